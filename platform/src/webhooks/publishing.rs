//! Publishing many events at once: each request with its own key and record, all in one statement.
//!
//! What an accepted event writes does not depend on anything that is read but the endpoints, so the requests
//! that come while others are being written go together: locks, looks for records, records, events,
//! deliveries and jobs, in one round trip and one commit, whose cost they share. A request whose key is
//! in use or was used is left out and goes the way of any mutation; so does one whose project has a
//! disabled endpoint that listens, because that endpoint must be looked at locked, and so does
//! everything on SQLite.

use std::{collections::HashMap, sync::Arc};

use futures::{FutureExt as _, future::BoxFuture};

use super::{
    deliveries::DeliveryId,
    dispatch::{Dispatch, Start},
    endpoints::EndpointId,
    events::{self, Event},
    patterns::Patterns,
    planning::DeliverWebhook,
    worker::Fresh,
};
use crate::{
    contract::{
        ApiError,
        auth::ProjectId,
        idempotency::{
            Asked, Deferred, Record,
            record::{Many, keep_many},
        },
        request_id::RequestId,
    },
    db::{self, Conn, Db, Gather, JsonText, Queryable as _, Tx},
    jobs::{self, Job as _, JobId, Taken, insert_jobs},
};

/// Events in one statement.
const LARGEST: usize = 64;

/// Projects in one question.
const LARGEST_QUESTION: usize = 200;

/// Publishes events.
#[derive(Clone)]
pub struct Publisher {
    listeners: Gather<ProjectId, Arc<[Listener]>>,
    together: Gather<Publication, bool>,
    is_alone: bool,
}

/// An endpoint, and what it listens to.
#[derive(Clone, Debug, sqlx::FromRow)]
struct Listener {
    id: EndpointId,
    project_id: ProjectId,
    event_types: JsonText<Patterns>,
    enabled: bool,
}

/// An event on its way into the store.
struct Publication {
    asked: Asked,
    record: Record,
    event: Arc<Event>,
    endpoints: Vec<EndpointId>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").finish_non_exhaustive()
    }
}

impl Publisher {
    /// Into this database; `dispatch` begins the deliveries that this process can make itself.
    pub fn new(db: Db, dispatch: Option<Dispatch>) -> Self {
        let of_listeners = db.clone();
        Self {
            is_alone: matches!(db, Db::Sqlite { .. }),
            listeners: Gather::new(LARGEST_QUESTION, move |projects| {
                listeners(of_listeners.clone(), projects).boxed()
            }),
            together: Gather::new(LARGEST, move |publications| {
                publish(db.clone(), dispatch.clone(), publications).boxed()
            }),
        }
    }

    /// The write that publishes an event.
    pub(super) fn publication(&self, event: Event) -> impl Deferred + 'static {
        Write {
            publisher: self.clone(),
            event: event.into(),
        }
    }
}

struct Write {
    publisher: Publisher,
    event: Arc<Event>,
}

impl Write {
    async fn publish(&self, asked: &Asked, record: &Record) -> sqlx::Result<bool> {
        if self.publisher.is_alone {
            return Ok(false);
        }
        let listeners = self.publisher.listeners.get(asked.project).await?;
        let listening: Vec<_> = listeners
            .iter()
            .filter(|listener| listener.event_types.0.matches(&self.event.event_type))
            .collect();
        if listening.iter().any(|listener| !listener.enabled) {
            return Ok(false);
        }
        let publication = Publication {
            asked: asked.clone(),
            record: record.clone(),
            event: self.event.clone(),
            endpoints: listening.iter().map(|listener| listener.id).collect(),
        };
        self.publisher.together.get(publication).await
    }
}

impl Deferred for Write {
    fn together<'a>(
        &'a self,
        asked: &'a Asked,
        record: &'a Record,
    ) -> BoxFuture<'a, sqlx::Result<bool>> {
        self.publish(asked, record).boxed()
    }

    fn alone<'a>(&'a self, tx: &'a mut Tx) -> BoxFuture<'a, Result<(), ApiError>> {
        async move { Ok(events::publish_event(tx, &self.event).await?) }.boxed()
    }
}

async fn listeners(db: Db, projects: Vec<ProjectId>) -> sqlx::Result<Vec<Arc<[Listener]>>> {
    let mut distinct: Vec<uuid::Uuid> = projects.iter().map(|id| (*id).into()).collect();
    distinct.sort_unstable();
    distinct.dedup();
    let mut reader = db.read().await?;
    let Conn::Postgres(conn) = reader.conn() else {
        return Err(db::only_postgres());
    };
    let asking = sqlx::query_as(
        "SELECT id, project_id, event_types, enabled FROM webhook_endpoints WHERE project_id = ANY($1)",
    )
    .bind(distinct)
    .fetch_all(conn);
    let found = db::answered(asking).await;
    let mut of: HashMap<ProjectId, Vec<Listener>> = HashMap::new();
    for listener in db::settle::<Vec<Listener>>(&mut reader, found)? {
        of.entry(listener.project_id).or_default().push(listener);
    }
    let of: HashMap<_, Arc<[Listener]>> =
        of.into_iter().map(|(id, all)| (id, all.into())).collect();
    let none: Arc<[Listener]> = Arc::default();
    Ok(projects
        .iter()
        .map(|id| of.get(id).unwrap_or(&none).clone())
        .collect())
}

/// The deliveries of many events, as the columns of their rows.
#[derive(Default)]
struct Deliveries {
    /// Of which request, from 1.
    of: Vec<i64>,
    ids: Vec<uuid::Uuid>,
    endpoints: Vec<uuid::Uuid>,
    requests: Vec<uuid::Uuid>,
    jobs: jobs::Rows,
}

impl Deliveries {
    /// Adds a delivery of the request at this place, and its job, which a worker may have taken.
    fn push(
        &mut self,
        of: usize,
        job: &DeliverWebhook,
        request_id: RequestId,
        taken_by: Option<&str>,
    ) -> serde_json::Result<JobId> {
        self.of.push(i64::try_from(of + 1).unwrap_or(i64::MAX));
        self.ids.push(job.delivery_id.into());
        self.endpoints.push(job.endpoint_id.into());
        self.requests.push(request_id.into());
        self.jobs.push(job, taken_by)
    }
}

/// A delivery that begins at once if its request goes through; dropped before that is known, it is left
/// to the queue.
struct Ready {
    of: usize,
    start: Start,
    taken: Taken<DeliverWebhook>,
    fresh: Fresh,
}

/// Publishes; for each, whether it was.
async fn publish(
    db: Db,
    dispatch: Option<Dispatch>,
    publications: Vec<Publication>,
) -> sqlx::Result<Vec<bool>> {
    let mut deliveries = Deliveries::default();
    let mut ready = Vec::new();
    for (of, publication) in publications.iter().enumerate() {
        for endpoint in &publication.endpoints {
            let job = DeliverWebhook::first(
                DeliveryId::generate(),
                publication.event.project_id,
                *endpoint,
            );
            let start = dispatch
                .as_ref()
                .and_then(|dispatch| dispatch.take(job.project_id, job.endpoint_id));
            let request_id = RequestId::generate();
            let taken_by = start.as_ref().map(|start| &**start.worker());
            let id = deliveries
                .push(of, &job, request_id, taken_by)
                .map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
            ready.extend(start.map(|mut start| {
                start.writes(id.clone());
                let taken = Taken {
                    job,
                    id,
                    worker: start.worker().clone(),
                    is_marked: true,
                };
                let fresh = Fresh {
                    event: publication.event.clone(),
                    request_id,
                };
                Ready {
                    of,
                    start,
                    taken,
                    fresh,
                }
            }));
        }
    }
    let waits = deliveries.of.len() > ready.len();
    let ran = match write(&db, &publications, deliveries).await {
        Ok(ran) => ran,
        Err(error) => {
            if !db::is_unavailable(&error) {
                for Ready { start, .. } in ready {
                    start.release();
                }
            }
            return Err(error);
        }
    };
    let mut done = vec![false; publications.len()];
    for (of,) in ran {
        let of = usize::try_from(of).ok().and_then(|of| of.checked_sub(1));
        if let Some(done) = of.and_then(|of| done.get_mut(of)) {
            *done = true;
        }
    }
    for Ready {
        of,
        start,
        taken,
        fresh,
    } in ready
    {
        if done[of] {
            start.begin(taken, fresh.into());
        } else {
            start.release();
        }
    }
    if waits {
        db::announced().notify_waiters();
    }
    Ok(done)
}

/// Writes all in one statement; the numbers of those that ran.
async fn write(
    db: &Db,
    publications: &[Publication],
    deliveries: Deliveries,
) -> sqlx::Result<Vec<(i64,)>> {
    let mut on = db.autocommit().await?;
    let Conn::Postgres(conn) = on.conn() else {
        return Err(db::only_postgres());
    };
    let many = Many::new(publications.iter().map(|one| (&one.asked, &one.record)));
    macro_rules! each {
        ($of:expr) => {
            publications.iter().map($of).collect::<Vec<_>>()
        };
    }
    let writing = sqlx::query_as::<_, (i64,)>(concat!(
        keep_many!(),
        ", happened AS MATERIALIZED (SELECT ran.n, ran.project_id, e.id, e.event_type, e.data, e.created_at \
         FROM UNNEST($11::uuid[], $12::text[], $13::text[], $14::timestamptz[]) WITH ORDINALITY \
         AS e (id, event_type, data, created_at, n) JOIN ran ON ran.n = e.n), \
         published AS (INSERT INTO events (id, project_id, event_type, data, created_at) \
         SELECT id, project_id, event_type, data, created_at FROM happened), \
         planned AS MATERIALIZED (SELECT h.project_id, h.id AS event_id, h.event_type, h.created_at AS due, \
         d.delivery_id, d.endpoint_id, d.request_id, d.id, d.job, d.key, d.lock_by \
         FROM UNNEST($15::bigint[], $16::uuid[], $17::uuid[], $18::uuid[], $19::text[], $20::bytea[], \
         $21::text[], $22::text[]) \
         AS d (n, delivery_id, endpoint_id, request_id, id, job, key, lock_by) JOIN happened h ON h.n = d.n), \
         delivered AS (INSERT INTO webhook_deliveries (id, project_id, event_id, event_type, endpoint_id, \
         request_id, state, attempts, next_number, ladder_number, step, job_copy, next_attempt_at, \
         created_at, updated_at) SELECT delivery_id, project_id, event_id, event_type, endpoint_id, \
         request_id, 'pending', 0, 2, 1, 1, 0, due, due, due FROM planned), \
         queued AS (",
        insert_jobs!("$23", "$24", "clock_timestamp()", "planned AS j"),
        ") SELECT n FROM ran"
    ));
    let writing = many
        .bind(writing)
        .bind(each!(|one| uuid::Uuid::from(one.event.id)))
        .bind(each!(|one| one.event.event_type.as_str()))
        .bind(each!(|one| one.event.data.as_str()))
        .bind(each!(|one| one.event.created_at))
        .bind(deliveries.of)
        .bind(deliveries.ids)
        .bind(deliveries.endpoints)
        .bind(deliveries.requests);
    let writing = deliveries
        .jobs
        .bind(writing)
        .bind(DeliverWebhook::QUEUE)
        .bind(jobs::FRESH)
        .fetch_all(conn);
    let written = db::answered(writing).await;
    db::settle(&mut on, written)
}
