//! How much a project may ask: GCRA per project, in this process.
//!
//! The whole window's requests may come at once; then they come back evenly. Every answer that belongs
//! to a project tells where it stands, in the two fields of the IETF draft: `RateLimit-Policy` with
//! quota and window, `RateLimit` with what remains and the seconds until all of it is back.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use governor::{
    Quota, RateLimiter,
    clock::{Clock as _, DefaultClock},
    middleware::StateInformationMiddleware,
    state::keyed::DashMapStateStore,
};
use poem::http::{HeaderMap, HeaderValue};

use super::auth::ProjectId;
use crate::{
    config,
    contract::{ApiError, Code},
};

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
}

/// Where a project stands after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    requests: u32,
    window: Duration,
    remaining: u32,
}

impl RateLimits {
    /// Limits by the settings.
    pub fn new(settings: &config::RateLimit) -> Self {
        let requests = NonZeroU32::new(settings.requests).unwrap_or(NonZeroU32::MIN);
        let period = (settings.window / requests.get()).max(Duration::from_nanos(1));
        let quota = Quota::with_period(period).map(|quota| quota.allow_burst(requests));
        let limiter = RateLimiter::keyed(quota.unwrap_or(Quota::per_second(requests)))
            .with_middleware::<StateInformationMiddleware>();
        Self {
            limiter: Arc::new(limiter),
            clock: DefaultClock::default(),
            requests,
            window: settings.window,
        }
    }

    /// Counts a request of a project; over the limit, `RATE_LIMITED` with the time to wait.
    pub fn count(&self, project: ProjectId) -> (Standing, Result<(), ApiError>) {
        if self.limiter.len() > REMEMBERED {
            self.limiter.retain_recent();
        }
        let standing = |remaining| Standing {
            requests: self.requests.get(),
            window: self.window,
            remaining,
        };
        match self.limiter.check_key(&project) {
            Ok(state) => (standing(state.remaining_burst_capacity()), Ok(())),
            Err(not_until) => {
                let wait = not_until.wait_time_from(self.clock.now());
                let error = ApiError::new(Code::RateLimited, Code::RateLimited.about());
                (standing(0), Err(error.with_retry_after(seconds_up(wait))))
            }
        }
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
    use std::time::Duration;

    use poem::http::HeaderMap;

    use super::{ProjectId, RateLimits};
    use crate::{config, contract::Code};

    #[test]
    fn a_project_has_its_own_limit_and_is_told_where_it_stands() {
        let settings = config::RateLimit {
            requests: 3,
            window: Duration::from_mins(1),
        };
        let limits = RateLimits::new(&settings);
        let project = ProjectId::generate();
        for remaining in ["2;t=20", "1;t=40", "0;t=60"] {
            let (standing, allowed) = limits.count(project);
            assert!(allowed.is_ok());
            let mut headers = HeaderMap::new();
            standing.write(&mut headers);
            assert_eq!(headers["ratelimit-policy"], "\"default\";q=3;w=60");
            assert_eq!(headers["ratelimit"], format!("\"default\";r={remaining}"));
        }
        let (_, refused) = limits.count(project);
        assert_eq!(
            refused.map_err(|error| error.code()),
            Err(Code::RateLimited)
        );
        assert!(limits.count(ProjectId::generate()).1.is_ok());
    }
}
