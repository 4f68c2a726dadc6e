//! Lanes: the jobs of a queue that wait for the same narrow place.
//!
//! Jobs that are due and find no room must not stand in the way of others, and must not be looked at again
//! and again. They are *parked*: they keep their order, with their lane written beside them, and are taken
//! out of it only as places become free. Who parked them does not matter: whoever runs the queue looks which
//! lanes have parked jobs, and a job whose lane nobody looked at for [`AT_MOST`] is due again, after all others.

use std::{sync::Arc, time::Duration};

use super::{JobId, Taken, store::park};
use crate::db::{Db, Gather};

/// The jobs that wait for one place.
pub type Lane = String;

/// How long after it was due a parked job is due again if nobody took it out; half of it for one that had been
/// due for long.
pub(super) const AT_MOST: Duration = Duration::from_mins(10);

/// What this is taken off a priority: parked jobs come after all others, and keep their order.
pub(super) const PARKED: i32 = 2;

/// The priorities that jobs have, from first to last.
pub(super) const PRIORITIES: [i32; 4] = [super::FRESH, 0, super::FRESH - PARKED, -PARKED];

/// Jobs that are parked in one statement.
const LARGEST: usize = 500;

/// What a queue asks about its lanes.
pub trait Lanes: Send + Sync {
    /// Whether jobs of this lane are parked when they come.
    fn is_crowded(&self, lane: &str) -> bool;

    /// Whether any lane is.
    fn is_any_crowded(&self) -> bool;

    /// How many parked jobs of which lanes would find a place now; no more than `most` in all.
    fn openings(&self, most: usize) -> Vec<(Lane, usize)>;

    /// There are parked jobs in these lanes.
    fn found(&self, lanes: Vec<Lane>);

    /// There are none in this lane any more.
    fn emptied(&self, lane: &str);
}

/// Parks jobs, together with others.
#[derive(Clone, Debug)]
pub struct Parking(Gather<Parked, ()>);

/// A job to be parked, and where.
#[derive(Clone, Debug)]
pub(super) struct Parked {
    pub(super) id: JobId,
    /// Who has it; nobody, where it is locked otherwise.
    pub(super) worker: Option<Arc<str>>,
    pub(super) lane: Lane,
}

impl Parking {
    /// In the queues of this database.
    pub fn new(db: Db) -> Self {
        Self(Gather::new(LARGEST, move |jobs| {
            Box::pin(park(db.clone(), jobs))
        }))
    }

    /// Parks a job; one that is another's by now stays as it is.
    pub async fn park<J>(&self, taken: &Taken<J>, lane: Lane) -> sqlx::Result<()> {
        let parked = Parked {
            id: taken.id.clone(),
            worker: Some(taken.worker.clone()),
            lane,
        };
        self.0.get(parked).await
    }
}
