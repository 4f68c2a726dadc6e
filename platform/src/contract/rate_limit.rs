//! How much a project may ask: GCRA per project, in Redis for all nodes, or in this process.
//!
//! The whole window's requests may come at once; then they come back evenly. Every answer that belongs
//! to a project tells where it stands, in the two fields of the IETF draft: `RateLimit-Policy` with
//! quota and window, `RateLimit` with what remains and the seconds until all of it is back. In Redis one
//! script, by the clock of Redis, keeps per project the moment when all of its window is back; while
//! Redis is out of reach each process counts by itself.

use std::{
    num::NonZeroU32,
    sync::{Arc, LazyLock},
    time::Duration,
};

use governor::{
    Quota, RateLimiter,
    clock::{Clock as _, DefaultClock},
    middleware::StateInformationMiddleware,
    state::keyed::DashMapStateStore,
};
use poem::http::{HeaderMap, HeaderValue};
use redis::Script;

use super::auth::ProjectId;
use crate::{
    config,
    contract::{ApiError, Code},
    shared::Shared,
};

/// Counts a request, in microseconds of the clock of Redis: `ARGV` is what one request takes and the
/// window; gives what remains, or else the wait as a negative number. What is kept may be damaged, or
/// from before the clock was set back: it never counts for more than the window.
static COUNT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local time = redis.call('TIME') \
         local now = time[1] * 1000000 + time[2] \
         local each, window = tonumber(ARGV[1]), tonumber(ARGV[2]) \
         local known = tonumber(redis.call('GET', KEYS[1]) or 0) or 0 \
         local back = math.min(math.max(known, now), now + window) + each \
         if back - now > window then return now + window - back end \
         redis.call('SET', KEYS[1], string.format('%.0f', back), 'PX', \
             math.ceil((back - now) / 1000)) \
         return math.floor((window - (back - now)) / each)",
    )
});

/// Projects that are remembered before those with a full quota are forgotten.
const REMEMBERED: usize = 10_000;

type Limiter =
    RateLimiter<ProjectId, DashMapStateStore<ProjectId>, DefaultClock, StateInformationMiddleware>;

/// The limits of all projects.
#[derive(Clone, Debug)]
pub struct RateLimits {
    limiter: Arc<Limiter>,
    clock: DefaultClock,
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

impl RateLimits {
    /// Limits by the settings, for all nodes where there is a Redis.
    pub fn new(settings: &config::RateLimit, shared: Option<Shared>) -> Self {
        let requests = NonZeroU32::new(settings.requests).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::with_period(each(settings.window, requests))
            .map(|quota| quota.allow_burst(requests));
        let limiter = RateLimiter::keyed(quota.unwrap_or(Quota::per_second(requests)))
            .with_middleware::<StateInformationMiddleware>();
        Self {
            limiter: Arc::new(limiter),
            clock: DefaultClock::default(),
            requests,
            window: settings.window,
            shared,
        }
    }

    /// Counts a request of a project; over the limit, `RATE_LIMITED` with the time to wait.
    pub async fn count(&self, project: ProjectId) -> (Standing, Result<(), ApiError>) {
        let counted = match self.count_for_all(project).await {
            Some(counted) => counted,
            None => self.count_here(project),
        };
        let standing = |remaining| Standing {
            requests: self.requests.get(),
            window: self.window,
            remaining,
        };
        match counted {
            Ok(remaining) => (standing(remaining), Ok(())),
            Err(wait) => {
                let error = ApiError::new(Code::RateLimited, Code::RateLimited.about());
                (standing(0), Err(error.with_retry_after(seconds_up(wait))))
            }
        }
    }

    /// Counts in Redis: what remains, or the time to wait; none, where there is no Redis in reach.
    async fn count_for_all(&self, project: ProjectId) -> Option<Result<u32, Duration>> {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let shared = self.shared.as_ref()?;
        let mut script = COUNT.key(format!("botix:rate:{project}"));
        script
            .arg(micros(each(self.window, self.requests)).max(1))
            .arg(micros(self.window));
        let counted: i64 = shared.invoke(&script).await.ok()?;
        Some(u32::try_from(counted).map_err(|_| Duration::from_micros(counted.unsigned_abs())))
    }

    fn count_here(&self, project: ProjectId) -> Result<u32, Duration> {
        if self.limiter.len() > REMEMBERED {
            self.limiter.retain_recent();
        }
        self.limiter
            .check_key(&project)
            .map(|state| state.remaining_burst_capacity())
            .map_err(|not_until| not_until.wait_time_from(self.clock.now()))
    }
}

/// How long a request takes to come back.
fn each(window: Duration, requests: NonZeroU32) -> Duration {
    (window / requests.get()).max(Duration::from_nanos(1))
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
    use std::time::Duration;

    use poem::http::HeaderMap;

    use super::{ProjectId, RateLimits};
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
        let (_, refused) = limits.count(project).await;
        assert_eq!(
            refused.map_err(|error| error.code()),
            Err(Code::RateLimited)
        );
        assert!(limits.count(ProjectId::generate()).await.1.is_ok());
    }
}
