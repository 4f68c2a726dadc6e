//! POST /contacts, for the first time and again.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    Fault,
    args::{Database, Load},
    client::{Answer, Client, key},
    load::{self, Job, Plan, Ticket},
    report::{Report, Row, remarks},
    rig::Rig,
};

/// How long the keys to replay may take to finish.
const PREPARING: Duration = Duration::from_mins(10);

/// New contacts.
pub async fn contacts(
    rig: &Rig,
    database: Database,
    load: Load,
    connections: u16,
) -> Result<Report, Fault> {
    let run = format!("POST /contacts, {}", load.describe(connections));
    eprintln!("{run} on {}", database.name());
    let client = rig.client.clone();
    let job = Arc::new(Job {
        make: Box::new(move |ticket| post(&client, ticket.number)),
        check: created,
    });
    let mut plan = Plan {
        rate: load.rate,
        time: load.warmup_time(),
        limit: u64::MAX,
        connections,
        first: 0,
    };
    let warm = load::run(&rig.client, plan, &job).await?;
    plan = Plan {
        time: load.time(),
        first: warm.next,
        ..plan
    };
    let before = rig.begin().await?;
    let tally = load::run(&rig.client, plan, &job).await?;
    let spent = rig.end(&before, tally.done).await?;

    let done = warm.done + tally.done;
    let possible = done + warm.unknown + tally.unknown;
    let (contacts, records) = rig.store.contacts_and_records().await?;
    let mut void = Vec::new();
    if contacts != records || !(done..=possible).contains(&contacts) {
        void.push(format!(
            "{done} to {possible} requests were done, but there are {contacts} contacts and {records} records"
        ));
    }
    Ok(Report {
        rows: vec![Row {
            run,
            database,
            per_second: tally.rate(),
            spent: Some(spent),
            operations: tally.done,
            remarks: remarks(&tally, load.rate),
            latencies: tally.latencies,
        }],
        void,
    })
}

/// The same contacts with the same keys.
pub async fn replays(
    rig: &Rig,
    database: Database,
    load: Load,
    connections: u16,
    keys: u64,
) -> Result<Report, Fault> {
    let run = format!("replay of POST /contacts, {}", load.describe(connections));
    eprintln!("{run} on {}", database.name());
    let client = rig.client.clone();
    let first = Arc::new(Job {
        make: Box::new(move |ticket| post(&client, ticket.number)),
        check: created,
    });
    let mut plan = Plan {
        rate: None,
        time: PREPARING,
        limit: keys,
        connections,
        first: 0,
    };
    let prepared = load::run(&rig.client, plan, &first).await?;
    if prepared.done < keys {
        return Err(format!(
            "only {} of {keys} keys could be finished: {:?}",
            prepared.done, prepared.errors
        )
        .into());
    }
    let client = rig.client.clone();
    let again = Arc::new(Job {
        make: Box::new(move |ticket: Ticket| post(&client, ticket.number % keys)),
        check: replayed,
    });
    plan = Plan {
        rate: load.rate,
        time: load.warmup_time(),
        limit: u64::MAX,
        ..plan
    };
    let warm = load::run(&rig.client, plan, &again).await?;
    plan = Plan {
        time: load.time(),
        first: warm.next,
        ..plan
    };
    let before = rig.begin().await?;
    let tally = load::run(&rig.client, plan, &again).await?;
    let spent = rig.end(&before, tally.done).await?;

    let (contacts, records) = rig.store.contacts_and_records().await?;
    let mut void = Vec::new();
    if (contacts, records) != (keys, keys) {
        void.push(format!(
            "{keys} keys made {contacts} contacts and {records} records"
        ));
    }
    Ok(Report {
        rows: vec![Row {
            run,
            database,
            per_second: tally.rate(),
            spent: Some(spent),
            operations: tally.done,
            remarks: remarks(&tally, load.rate),
            latencies: tally.latencies,
        }],
        void,
    })
}

pub(super) fn post(client: &Client, number: u64) -> hyper::Request<http_body_util::Full<Bytes>> {
    let body = format!(
        r#"{{"phone":"+49{number:011}","name":"Contact {number}","email":"contact-{number}@example.com","tags":["vip"],"attributes":{{"plan":"pro"}}}}"#
    );
    client.post("/contacts", key(number), "application/json", body.into())
}

pub(super) fn created(answer: &Answer) -> Result<(), String> {
    if answer.status != 201 {
        return Err(answer.complaint());
    }
    if answer.replayed {
        return Err("201, replayed".to_owned());
    }
    Ok(())
}

fn replayed(answer: &Answer) -> Result<(), String> {
    if answer.status != 201 {
        return Err(answer.complaint());
    }
    if !answer.replayed {
        return Err("201, not replayed".to_owned());
    }
    Ok(())
}
