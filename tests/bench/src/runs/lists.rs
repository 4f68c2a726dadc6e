//! GET /contacts: the first page and one deep down, in turn, so that whatever else the machine does
//! meets both. Beside them the deprecated offset mode: through the API as deep as it goes, and at the
//! depth of the page in the database alone.

use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::{
    Fault,
    args::{Database, Lists},
    client::{Client, Connection},
    figures::{Latencies, float, thousands},
    report::{Report, Row},
    rig::Rig,
};

/// Contacts on a page: the most that a page can have.
const LIMIT: u64 = 200;

/// The deepest that the offset mode goes.
const OFFSET_BOUND: u64 = 10_000;

/// How often the deep offset is read: each takes as long as the table is deep.
const OFFSET_READINGS: u64 = 20;

/// How long the walk and the readings may take together.
const PATIENCE: Duration = Duration::from_mins(30);

#[derive(Deserialize)]
struct Page {
    data: Vec<Item>,
    next_cursor: Option<String>,
}

#[derive(Deserialize)]
struct Item {
    id: String,
}

/// Loads the contacts, walks down, reads.
pub async fn run(rig: &Rig, database: Database, lists: Lists) -> Result<Report, Fault> {
    let deep = lists.page.min(lists.contacts / LIMIT);
    eprintln!(
        "GET /contacts, pages 1 and {deep} of {} contacts on {}",
        thousands(lists.contacts),
        database.name()
    );
    let begun = Instant::now();
    rig.store.load_contacts(rig.project, lists.contacts).await?;
    eprintln!("  loaded in {:.1} s", begun.elapsed().as_secs_f64());

    let begun = Instant::now();
    let client = &rig.client;
    let mut connection = client.connect().await?;
    let top = format!("/contacts?cursor_limit={LIMIT}");
    let mut below = top.clone();
    let mut newest = None;
    let mut void = Vec::new();
    for number in 1..deep {
        let page = read(client, &mut connection, &below, begun).await?.0;
        // Newest first and none twice: each page starts below the one before.
        let first = page.data.first().map(|item| item.id.clone());
        if page.data.len() as u64 != LIMIT || newest.is_some() && first >= newest {
            void.push(format!("page {number} is not the next {LIMIT} contacts"));
        }
        newest = first;
        let cursor = page.next_cursor.ok_or("the walk ends early")?;
        below = format!("{top}&cursor={cursor}");
    }
    eprintln!(
        "  walked {deep} pages in {:.1} s",
        begun.elapsed().as_secs_f64()
    );

    let mut latencies = [Latencies::default(), Latencies::default()];
    let before = rig.begin().await?;
    for _ in 0..lists.samples {
        for (path, latencies) in [&top, &below].into_iter().zip(&mut latencies) {
            let (page, latency) = read(client, &mut connection, path, begun).await?;
            latencies.record(latency);
            if page.data.len() as u64 != LIMIT {
                void.push(format!("a page of {} contacts", page.data.len()));
            }
        }
    }
    let spent = rig.end(&before, 2 * lists.samples).await?;
    let by_offset = offsets(rig, database, lists, &mut connection, begun).await?;
    void.truncate(5);

    let [first, last] = latencies;
    let ratio = last.percentile(50.0) / first.percentile(50.0).max(0.001);
    let row = |page: u64, latencies: Latencies, remarks: Vec<String>| Row {
        run: format!(
            "GET /contacts, page {} of {LIMIT}, {} contacts, 1 connection",
            thousands(page),
            thousands(lists.contacts)
        ),
        database,
        per_second: 1_000.0 / latencies.mean().max(0.001),
        spent: Some(spent),
        operations: 2 * lists.samples,
        remarks: [
            vec![format!("p95 {:.2} ms", latencies.percentile(95.0))],
            remarks,
        ]
        .concat(),
        latencies,
    };
    let ratio = format!(
        "median {ratio:.2} × that of page 1 over {:.0} readings of each",
        float(lists.samples)
    );
    let mut rows = vec![row(1, first, Vec::new()), row(deep, last, vec![ratio])];
    rows.extend(by_offset);
    Ok(Report { rows, void })
}

/// The offset mode at its bound, and what it would cost as deep as the page.
async fn offsets(
    rig: &Rig,
    database: Database,
    lists: Lists,
    connection: &mut Connection,
    begun: Instant,
) -> Result<Vec<Row>, Fault> {
    let row = |run: String, latencies: Latencies, spent, operations| Row {
        run,
        database,
        per_second: 1_000.0 / latencies.mean().max(0.001),
        spent,
        operations,
        remarks: vec![format!("p95 {:.2} ms", latencies.percentile(95.0))],
        latencies,
    };
    let bound = OFFSET_BOUND.min(lists.contacts - LIMIT);
    let path = format!("/contacts?pagination=offset&offset={bound}&limit={LIMIT}");
    let mut by_api = Latencies::default();
    let before = rig.begin().await?;
    for _ in 0..lists.samples {
        by_api.record(read(&rig.client, connection, &path, begun).await?.1);
    }
    let spent = rig.end(&before, lists.samples).await?;
    let depth = (lists.page.min(lists.contacts / LIMIT) - 1) * LIMIT;
    let mut in_database = Latencies::default();
    for _ in 0..lists.samples.min(OFFSET_READINGS) {
        let sent = Instant::now();
        let rows = rig
            .store
            .contacts_by_offset(rig.project, LIMIT, depth)
            .await?;
        in_database.record(sent.elapsed());
        if rows != LIMIT {
            return Err(format!("{rows} contacts at offset {depth}").into());
        }
    }
    Ok(vec![
        row(
            format!(
                "GET /contacts, deprecated offset {}, {LIMIT} rows",
                thousands(bound)
            ),
            by_api,
            Some(spent),
            lists.samples,
        ),
        row(
            format!(
                "the query alone by OFFSET {}, {LIMIT} rows",
                thousands(depth)
            ),
            in_database,
            None,
            0,
        ),
    ])
}

/// A page, and how long it took until its last byte.
async fn read(
    client: &Client,
    connection: &mut Connection,
    path: &str,
    begun: Instant,
) -> Result<(Page, Duration), Fault> {
    if begun.elapsed() > PATIENCE {
        return Err("the lists took half an hour".into());
    }
    let request = client.get(path);
    let sent = Instant::now();
    let answer = connection.send(request).await?;
    let latency = sent.elapsed();
    if answer.status != 200 {
        return Err(format!("GET {path}: {}", answer.complaint()).into());
    }
    Ok((serde_json::from_slice(&answer.body)?, latency))
}
