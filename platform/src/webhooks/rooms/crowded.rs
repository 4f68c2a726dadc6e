//! Which endpoints have deliveries that wait for room, for the queue that parks them.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{Part, Room, Rooms, locked};
use crate::{
    contract::auth::ProjectId,
    jobs::{Lane, Lanes},
    webhooks::endpoints::EndpointId,
};

/// Endpoints that are remembered at most.
const MOST: usize = 10_000;

/// Endpoints that are looked at at a time.
const LOOK: usize = 1_000;

/// How long places are gathered before they are given to those that are parked.
const A_MOMENT: Duration = Duration::from_millis(10);

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
    /// When places were given to its deliveries last.
    given: Option<Instant>,
}

impl Crowd {
    /// Whether so many free places of a room of this size are enough to be given: each one as it becomes free
    /// would cost as much as all that do in a moment.
    fn is_worth(&self, places: usize, size: usize) -> bool {
        let waited = self.given.is_none_or(|given| given.elapsed() >= A_MOMENT);
        places > 0 && (waited || places * 2 >= size)
    }
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
            given: known.endpoints.get(&endpoint).and_then(|crowd| crowd.given),
        };
        known.endpoints.insert(endpoint, crowd);
        true
    }

    /// Notes whose an endpoint is, if its lane was found without knowing that.
    pub(super) fn belongs(&self, project: ProjectId, endpoint: EndpointId) {
        if let Some(crowd) = locked(&self.0).endpoints.get_mut(&endpoint) {
            crowd.project.get_or_insert(project);
        }
    }

    /// Whether deliveries to this endpoint are parked, as far as is known.
    pub(super) fn knows(&self, endpoint: EndpointId) -> bool {
        locked(&self.0).endpoints.contains_key(&endpoint)
    }
}

/// What is still to be given out in one round.
struct Budget<'q> {
    queue: &'q Part,
    left: usize,
    slow: usize,
    probing: usize,
    projects: HashMap<ProjectId, OfProject>,
}

/// What of it one project may have.
struct OfProject {
    left: usize,
    slow: usize,
}

impl<'q> Budget<'q> {
    fn new(queue: &'q Part, most: usize) -> Self {
        let slow = queue.slow.of(());
        Self {
            queue,
            left: most,
            slow: queue.most_slow.saturating_sub(slow),
            probing: queue.probing.saturating_sub(slow),
            projects: HashMap::new(),
        }
    }

    /// How many places at an endpoint are given to its deliveries.
    fn give(&mut self, project: Option<ProjectId>, room: &Room) -> usize {
        let mut places = room
            .slots
            .available_permits()
            .min(room.opening())
            .min(self.left);
        let mut nobody = OfProject { left: 1, slow: 1 };
        let of_project = match project {
            Some(project) => (self.projects.entry(project)).or_insert_with(|| {
                let (queue, held) = (self.queue, self.queue.projects.of(project));
                OfProject {
                    left: queue.most_of_project.saturating_sub(held),
                    slow: queue.most_slow_of.saturating_sub(queue.slow_of.of(project)),
                }
            }),
            // The first one tells whose it is.
            None => &mut nobody,
        };
        places = places.min(of_project.left);
        if room.is_slow() {
            let all = if room.is_unknown_and_empty() {
                self.probing
            } else {
                self.slow
            };
            places = places.min(all).min(of_project.slow);
            self.slow = self.slow.saturating_sub(places);
            self.probing = self.probing.saturating_sub(places);
            of_project.slow -= places;
        }
        of_project.left -= places;
        self.left -= places;
        places
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
        let mut budget = Budget::new(&self.0.from_queue, most);
        let mut openings = Vec::new();
        let mut last = None;
        for (endpoint, crowd) in later.chain(sooner).take(LOOK) {
            if budget.left == 0 {
                break;
            }
            last = Some(*endpoint);
            let room = self.of(*endpoint);
            if crowd.is_worth(room.slots.available_permits(), self.0.size) {
                let places = budget.give(crowd.project, &room);
                openings.extend((places > 0).then_some((*endpoint, places)));
            }
        }
        // Who got nothing because others did comes first next time.
        let last = openings.last().map(|(endpoint, _)| *endpoint).or(last);
        known.last = last.or(known.last);
        for (endpoint, _) in &openings {
            if let Some(crowd) = known.endpoints.get_mut(endpoint) {
                crowd.given = Some(Instant::now());
            }
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
                given: None,
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
