//! How much a project may ask: GCRA per project, in Redis for all nodes, or in this process.
//!
//! The whole window's requests may come at once; then they come back evenly. Every answer that belongs
//! to a project tells where it stands, in the two fields of the IETF draft: `RateLimit-Policy` with
//! quota and window, `RateLimit` with what remains and the seconds until all of it is back. What is
//! kept of a project is the moment when all of its window is back: in Redis, by its clock and one script,
//! and while Redis is out of reach in each process by itself. No library that does the same tells where
//! a project stands without counting.

use std::{
    collections::HashMap,
    num::NonZeroU32,
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

use poem::http::{HeaderMap, HeaderValue};
use redis::Script;

use super::auth::ProjectId;
use crate::{
    config,
    contract::{ApiError, Code},
    shared::Shared,
};

/// Counts a request, in microseconds of the clock of Redis: `ARGV` is what one request takes, the
/// window, and what this one takes, which may be nothing; gives what remains, or else the wait as a
/// negative number. What is kept may be damaged, or from before the clock was set back: it never
/// counts for more than the window.
static COUNT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local time = redis.call('TIME') \
         local now = time[1] * 1000000 + time[2] \
         local each, window, takes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]) \
         local known = tonumber(redis.call('GET', KEYS[1]) or 0) or 0 \
         local back = math.min(math.max(known, now), now + window) + takes \
         if back - now > window then return now + window - back end \
         if takes > 0 then \
             redis.call('SET', KEYS[1], string.format('%.0f', back), 'PX', \
                 math.ceil((back - now) / 1000)) \
         end \
         return math.floor((window - (back - now)) / each)",
    )
});

/// Projects that are remembered before those with a full quota are forgotten.
const REMEMBERED: usize = 10_000;

/// The limits of all projects.
#[derive(Clone, Debug)]
pub struct RateLimits {
    /// When all of a project's window is back.
    back: Arc<Mutex<HashMap<ProjectId, Instant>>>,
    requests: NonZeroU32,
    window: Duration,
    shared: Option<Shared>,
}

/// Where a project stands after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    requests: u32,
    window: Duration,
    remaining: u32,
}

/// Whether a request counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    ToGoOn,
    HowItStands,
}

impl RateLimits {
    /// Limits by the settings, for all nodes where there is a Redis.
    pub fn new(settings: &config::RateLimit, shared: Option<Shared>) -> Self {
        Self {
            back: Arc::default(),
            requests: NonZeroU32::new(settings.requests).unwrap_or(NonZeroU32::MIN),
            window: settings.window,
            shared,
        }
    }

    /// Counts a request of a project; over the limit, `RATE_LIMITED` with the time to wait.
    pub async fn count(&self, project: ProjectId) -> (Standing, Result<(), ApiError>) {
        match self.ask(project, Asking::ToGoOn).await {
            Ok(remaining) => (self.standing(remaining), Ok(())),
            Err(wait) => {
                let error = ApiError::new(Code::RateLimited, Code::RateLimited.about());
                let error = error.with_retry_after(seconds_up(wait));
                (self.standing(0), Err(error))
            }
        }
    }

    /// Where a project stands; counts nothing.
    pub async fn look(&self, project: ProjectId) -> Standing {
        let remaining = self.ask(project, Asking::HowItStands).await;
        self.standing(remaining.unwrap_or(0).min(self.requests.get()))
    }

    fn standing(&self, remaining: u32) -> Standing {
        Standing {
            requests: self.requests.get(),
            window: self.window,
            remaining,
        }
    }

    /// What remains, or the time to wait.
    async fn ask(&self, project: ProjectId, asking: Asking) -> Result<u32, Duration> {
        match self.ask_all(project, asking).await {
            Some(answer) => answer,
            None => self.ask_here(project, asking, Instant::now()),
        }
    }

    /// By what Redis knows; none, where there is no Redis in reach.
    async fn ask_all(&self, project: ProjectId, asking: Asking) -> Option<Result<u32, Duration>> {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let shared = self.shared.as_ref()?;
        let each = micros(self.each()).max(1);
        let mut script = COUNT.key(format!("botix:rate:{project}"));
        script.arg(each).arg(micros(self.window)).arg(match asking {
            Asking::ToGoOn => each,
            Asking::HowItStands => 0,
        });
        let answer: i64 = shared.invoke(&script).await.ok()?;
        Some(u32::try_from(answer).map_err(|_| Duration::from_micros(answer.unsigned_abs())))
    }

    /// By what this process knows.
    fn ask_here(&self, project: ProjectId, asking: Asking, now: Instant) -> Result<u32, Duration> {
        let mut known = self.back.lock().unwrap_or_else(PoisonError::into_inner);
        let back = known.get(&project).map_or(now, |back| now.max(*back));
        let takes = match asking {
            Asking::ToGoOn => self.each(),
            Asking::HowItStands => Duration::ZERO,
        };
        let missing = back - now + takes;
        let too_much = missing.saturating_sub(self.window);
        if !too_much.is_zero() {
            return Err(too_much);
        }
        let left = self.window.saturating_sub(missing);
        if asking == Asking::ToGoOn {
            if known.len() >= REMEMBERED && !known.contains_key(&project) {
                known.retain(|_, back| *back > now);
            }
            known.insert(project, now + missing);
        }
        Ok(u32::try_from(left.as_nanos() / self.each().as_nanos()).unwrap_or(u32::MAX))
    }

    /// How long a request takes to come back.
    fn each(&self) -> Duration {
        (self.window / self.requests.get()).max(Duration::from_nanos(1))
    }
}

impl Standing {
    /// Writes the two fields.
    pub fn write(self, headers: &mut HeaderMap) {
        let (quota, window) = (self.requests, seconds_up(self.window));
        let missing = u64::from(quota - self.remaining.min(quota));
        let full_in = (window * missing).div_ceil(u64::from(quota.max(1)));
        let fields = [
            (
                "ratelimit-policy",
                format!("\"default\";q={quota};w={window}"),
            ),
            (
                "ratelimit",
                format!("\"default\";r={};t={full_in}", self.remaining),
            ),
        ];
        for (name, value) in fields {
            if let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(name, value);
            }
        }
    }
}

/// Whole seconds, at least one, never fewer than asked.
fn seconds_up(duration: Duration) -> u64 {
    let more = u64::from(duration.subsec_nanos() > 0);
    (duration.as_secs() + more).max(1)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use poem::http::HeaderMap;

    use super::{Asking, ProjectId, RateLimits};
    use crate::{config, contract::Code};

    #[tokio::test]
    async fn a_project_has_its_own_limit_and_is_told_where_it_stands() {
        let settings = config::RateLimit {
            requests: 3,
            window: Duration::from_mins(1),
        };
        let limits = RateLimits::new(&settings, None);
        let project = ProjectId::generate();
        for remaining in ["2;t=20", "1;t=40", "0;t=60"] {
            let (standing, allowed) = limits.count(project).await;
            assert!(allowed.is_ok());
            let mut headers = HeaderMap::new();
            standing.write(&mut headers);
            assert_eq!(headers["ratelimit-policy"], "\"default\";q=3;w=60");
            assert_eq!(headers["ratelimit"], format!("\"default\";r={remaining}"));
        }
        let (standing, refused) = limits.count(project).await;
        assert_eq!(
            refused.map_err(|error| error.code()),
            Err(Code::RateLimited)
        );
        assert_eq!(limits.look(project).await, standing);
        let other = ProjectId::generate();
        assert_eq!(limits.look(other).await.remaining, 3);
        assert!(limits.count(other).await.1.is_ok());
        assert_eq!(limits.look(other).await.remaining, 2);
    }

    #[test]
    fn what_was_used_comes_back_evenly() {
        let settings = config::RateLimit {
            requests: 3,
            window: Duration::from_mins(1),
        };
        let limits = RateLimits::new(&settings, None);
        let project = ProjectId::generate();
        let start = Instant::now();
        let ask = |seconds| {
            let now = start + Duration::from_secs(seconds);
            limits.ask_here(project, Asking::ToGoOn, now)
        };
        assert_eq!([ask(0), ask(0), ask(0)], [Ok(2), Ok(1), Ok(0)]);
        assert_eq!(ask(5), Err(Duration::from_secs(15)));
        assert_eq!(ask(20), Ok(0));
        assert_eq!(ask(39), Err(Duration::from_secs(1)));
        assert_eq!([ask(200), ask(200)], [Ok(2), Ok(1)]);
    }
}
