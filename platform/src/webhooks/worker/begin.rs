//! Beginning an attempt: the mark of its job, given only while the attempt is the next of its delivery.
//!
//! What was read of a delivery may be old when its job is marked: paused and resumed meanwhile, the attempt
//! has another job, and an older one of the same attempt may have ended just now. So the mark and the look at
//! the delivery are one statement, which locks the delivery against both: whoever resumes or settles it
//! comes before the mark, which then is not given, or after it, and finds the job begun. A delivery that is
//! locked by somebody else is not waited for, since others are marked with it: its job is looked at again.

use std::{collections::HashSet, sync::Arc};

use crate::{
    db::{self, Conn, Db, Gather, Queryable as _, fetch_optional},
    jobs::{JobId, Taken},
    webhooks::{deliveries::DeliveryId, planning::DeliverWebhook},
};

/// Marks in one statement.
const LARGEST: usize = 200;

/// A job, and the attempt that has to be its delivery's next.
#[derive(Clone)]
struct Asked {
    job: JobId,
    worker: Arc<str>,
    next: Option<(DeliveryId, i64, i64)>,
}

/// Marks the jobs of attempts, together with others.
#[derive(Clone)]
pub struct Begin(Gather<Asked, bool>);

impl Begin {
    /// In this database.
    pub fn new(db: Db) -> Self {
        Self(Gather::new(LARGEST, move |asked| {
            Box::pin(mark(db.clone(), asked))
        }))
    }

    /// Marks a job; false when it is another worker's by now, or its attempt is not surely the next of its
    /// delivery. An attempt that is no step of the ladder, or that is only to be recorded, is
    /// `whatever_is_next`.
    pub(super) async fn mark(
        &self,
        taken: &Taken<DeliverWebhook>,
        whatever_is_next: bool,
    ) -> sqlx::Result<bool> {
        if taken.is_marked {
            return Ok(true);
        }
        let job = &taken.job;
        let next = (job.delivery_id, job.number, job.copy);
        let asked = Asked {
            job: taken.id.clone(),
            worker: taken.worker.clone(),
            next: (!whatever_is_next).then_some(next),
        };
        self.0.get(asked).await
    }
}

async fn mark(db: Db, asked: Vec<Asked>) -> sqlx::Result<Vec<bool>> {
    let marked: HashSet<String> = match &db {
        Db::Postgres(_) => mark_in_postgres(&db, &asked).await?,
        Db::Sqlite { .. } => mark_in_sqlite(&db, &asked).await?,
    };
    Ok((asked.iter())
        .map(|asked| marked.contains(asked.job.as_str()))
        .collect())
}

async fn mark_in_postgres(db: &Db, asked: &[Asked]) -> sqlx::Result<HashSet<String>> {
    let mut on = db.autocommit().await?;
    let Conn::Postgres(conn) = on.conn() else {
        return Err(db::only_postgres());
    };
    macro_rules! each {
        ($of:expr) => {
            asked.iter().map($of).collect::<Vec<_>>()
        };
    }
    let marking = sqlx::query_as(
        // Both locked in the order of their ids, as by all who lock many.
        "WITH asked AS MATERIALIZED (SELECT * FROM UNNEST($1::text[], $2::text[], $3::uuid[], $4::bigint[], \
         $5::bigint[]) AS a (id, worker, delivery, number, copy)), \
         current AS MATERIALIZED (SELECT id, ladder_number, job_copy FROM webhook_deliveries \
         WHERE id = ANY ($3) AND state IN ('pending', 'retrying') ORDER BY id FOR SHARE SKIP LOCKED), \
         taken AS MATERIALIZED (SELECT j.id FROM apalis.jobs j JOIN asked a ON j.id = a.id \
         AND j.lock_by = a.worker LEFT JOIN current c ON c.id = a.delivery WHERE a.delivery IS NULL \
         OR c.ladder_number = a.number AND c.job_copy = a.copy ORDER BY j.id FOR UPDATE OF j) \
         UPDATE apalis.jobs j SET begun_at = now() FROM taken WHERE j.id = taken.id RETURNING j.id",
    )
    .bind(each!(|asked| asked.job.as_str()))
    .bind(each!(|asked| &*asked.worker))
    .bind(each!(|asked| asked
        .next
        .map(|(delivery, ..)| uuid::Uuid::from(delivery))))
    .bind(each!(|asked| asked.next.map(|(_, number, _)| number)))
    .bind(each!(|asked| asked.next.map(|(.., copy)| copy)))
    .fetch_all(conn);
    let marked = db::answered(marking).await;
    let marked: Vec<(String,)> = db::settle(&mut on, marked)?;
    Ok(marked.into_iter().map(|(id,)| id).collect())
}

async fn mark_in_sqlite(db: &Db, asked: &[Asked]) -> sqlx::Result<HashSet<String>> {
    let mut tx = db.begin().await?;
    let mut all = HashSet::new();
    for asked in asked {
        let marked = fetch_optional!(
            &mut tx,
            (String,),
            "UPDATE Jobs SET begun_at = unixepoch() WHERE id = $1 AND lock_by = $2 AND ($3 IS NULL \
             OR EXISTS (SELECT 1 FROM webhook_deliveries WHERE id = $3 AND state IN ('pending', 'retrying') \
             AND ladder_number = $4 AND job_copy = $5)) RETURNING id",
            asked.job.as_str(),
            &*asked.worker,
            asked.next.map(|(delivery, ..)| delivery),
            asked.next.map(|(_, number, _)| number),
            asked.next.map(|(.., copy)| copy)
        )?;
        all.extend(marked.map(|(id,)| id));
    }
    tx.commit().await?;
    Ok(all)
}
