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
const MOST: usize = 1_000;

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
}

/// A lane is an endpoint, as it is written in the API.
pub(in crate::webhooks) fn lane(endpoint: EndpointId) -> Lane {
    endpoint.to_string()
}

impl Lanes for Rooms {
    fn is_crowded(&self, lane: &str) -> bool {
        let known = locked(&self.0.crowded.0);
        (lane.parse()).is_ok_and(|endpoint: EndpointId| known.endpoints.contains_key(&endpoint))
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
        let mut openings = Vec::new();
        let mut given = 0;
        let mut of_projects: HashMap<ProjectId, usize> = HashMap::new();
        let mut slow = 0;
        for (endpoint, crowd) in later.chain(sooner) {
            if given >= most {
                break;
            }
            let mut places = self.free(*endpoint, slow).min(most - given);
            match crowd.project {
                Some(project) => {
                    let of_project = of_projects.entry(project).or_insert(0);
                    places = places.min(self.free_of(project).saturating_sub(*of_project));
                    *of_project += places;
                }
                // The first one tells whose it is.
                None => places = places.min(1),
            }
            if places > 0 {
                given += places;
                if self.is_slow(*endpoint) {
                    slow += places;
                }
                openings.push((*endpoint, places));
            }
        }
        if let Some((last, _)) = openings.last() {
            known.last = Some(*last);
        }
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
