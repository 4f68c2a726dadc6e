//! Which endpoints have deliveries that wait for room, for the queue that parks them.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{Rooms, locked};
use crate::{
    contract::auth::ProjectId,
    jobs::{Lane, Lanes},
    webhooks::endpoints::EndpointId,
};

/// Endpoints that are remembered at most.
const MOST: usize = 10_000;

/// Endpoints that are looked at at a time.
const LOOK: usize = 1_000;

/// How long after a job was sent to be parked it surely is, or its parking failed.
const UNTIL_PARKED: Duration = Duration::from_secs(1);

/// The endpoints with parked deliveries, as far as this process knows.
#[derive(Debug, Default)]
pub(super) struct Crowded(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    endpoints: BTreeMap<EndpointId, Crowd>,
    /// Where the last giving out of places ended.
    last: Option<EndpointId>,
}

#[derive(Debug)]
struct Crowd {
    /// Whose it is, once a delivery of it was seen.
    project: Option<ProjectId>,
    /// When the last delivery was sent to be parked.
    since: Instant,
}

impl Crowded {
    /// Notes an endpoint, one of whose deliveries is about to be parked; false when too many are known.
    pub(super) fn note(&self, project: ProjectId, endpoint: EndpointId) -> bool {
        let mut known = locked(&self.0);
        if known.endpoints.len() >= MOST && !known.endpoints.contains_key(&endpoint) {
            return false;
        }
        let crowd = Crowd {
            project: Some(project),
            since: Instant::now(),
        };
        known.endpoints.insert(endpoint, crowd);
        true
    }

    /// Whether deliveries to this endpoint are parked, as far as is known.
    pub(super) fn knows(&self, endpoint: EndpointId) -> bool {
        locked(&self.0).endpoints.contains_key(&endpoint)
    }
}

/// A lane is an endpoint, as it is written in the API.
pub(in crate::webhooks) fn lane(endpoint: EndpointId) -> Lane {
    endpoint.to_string()
}

impl Lanes for Rooms {
    fn is_crowded(&self, lane: &str) -> bool {
        (lane.parse()).is_ok_and(|endpoint| self.0.crowded.knows(endpoint))
    }

    fn is_any_crowded(&self) -> bool {
        !locked(&self.0.crowded.0).endpoints.is_empty()
    }

    fn openings(&self, most: usize) -> Vec<(Lane, usize)> {
        let mut known = locked(&self.0.crowded.0);
        let after = known.last.map_or(Bound::Unbounded, Bound::Excluded);
        let upto = known.last.map_or(
            Bound::Excluded(EndpointId::from_ulid(ulid::Ulid::nil())),
            Bound::Included,
        );
        let later = known.endpoints.range((after, Bound::Unbounded));
        let sooner = known.endpoints.range((Bound::Unbounded, upto));
        let queue = &self.0.from_queue;
        let mut openings = Vec::new();
        let mut left = most;
        let mut left_slow = queue.most_slow.saturating_sub(queue.slow.of(()));
        let mut left_probing = queue.probing.saturating_sub(queue.slow.of(()));
        let mut of_projects: HashMap<ProjectId, (usize, usize)> = HashMap::new();
        let mut last = None;
        for (endpoint, crowd) in later.chain(sooner).take(LOOK) {
            if left == 0 {
                break;
            }
            last = Some(*endpoint);
            let (places, is_slow) = self.free(*endpoint);
            // The first one tells whose it is.
            let mut places = places
                .min(left)
                .min(crowd.project.map_or(1, |_| usize::MAX));
            let mut nobody = (usize::MAX, usize::MAX);
            let (of_project, slow_of) = match crowd.project {
                Some(project) => of_projects.entry(project).or_insert_with(|| {
                    (
                        queue
                            .most_of_project
                            .saturating_sub(queue.projects.of(project)),
                        queue.most_slow_of.saturating_sub(queue.slow_of.of(project)),
                    )
                }),
                None => &mut nobody,
            };
            places = places.min(*of_project);
            if is_slow {
                let probes = self.of(*endpoint).is_unknown_and_empty();
                let all = if probes {
                    &mut left_probing
                } else {
                    &mut left_slow
                };
                places = places.min(*all).min(*slow_of);
                left_slow = left_slow.saturating_sub(places);
                left_probing = left_probing.saturating_sub(places);
                *slow_of -= places;
            }
            *of_project -= places;
            left -= places;
            if places > 0 {
                openings.push((*endpoint, places));
            }
        }
        known.last = last.or(known.last);
        let named = |(endpoint, places)| (lane(endpoint), places);
        openings.into_iter().map(named).collect()
    }

    fn found(&self, lanes: Vec<Lane>) {
        let mut known = locked(&self.0.crowded.0);
        for endpoint in lanes.iter().filter_map(|lane| lane.parse().ok()) {
            if known.endpoints.len() >= MOST {
                break;
            }
            known.endpoints.entry(endpoint).or_insert(Crowd {
                project: None,
                since: Instant::now(),
            });
        }
    }

    fn emptied(&self, lane: &str) {
        let mut known = locked(&self.0.crowded.0);
        let Ok(endpoint) = lane.parse::<EndpointId>() else {
            return;
        };
        let is_settled = |crowd: &Crowd| crowd.since.elapsed() >= UNTIL_PARKED;
        if known.endpoints.get(&endpoint).is_some_and(is_settled) {
            known.endpoints.remove(&endpoint);
        }
    }
}
