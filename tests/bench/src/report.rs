//! One row of figures per run, as a Markdown table.

use std::collections::BTreeMap;

use crate::{
    args::Database,
    figures::{Latencies, float, thousands},
    load::Tally,
    rig::Spent,
};

/// The head of the table.
pub const HEAD: &str = "\
| run | database | per second | p50 ms | p90 ms | p99 ms | max ms | CPU ms each: server | databases | bench | statements each | server peak MiB | remarks |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |";

/// Figures of one run.
#[derive(Debug)]
pub struct Row {
    /// What ran.
    pub run: String,
    /// On what.
    pub database: Database,
    /// Operations per second.
    pub per_second: f64,
    /// How long one took.
    pub latencies: Latencies,
    /// CPU of all of them; `None` where another row has it.
    pub spent: Option<Spent>,
    /// How many that CPU was for.
    pub operations: u64,
    /// What to know beside the figures.
    pub remarks: Vec<String>,
}

impl Row {
    /// The row in Markdown.
    pub fn markdown(&self) -> String {
        let Self {
            run,
            database,
            per_second,
            latencies,
            ..
        } = self;
        let cpu = match self.spent {
            Some(spent) => {
                let each = |whole: f64| whole / float(self.operations.max(1));
                let statements = match spent.statements {
                    0 => String::new(),
                    some => format!("{:.1}", each(float(some))),
                };
                format!(
                    "{:.2} | {:.2} | {:.2} | {statements} | {:.0}",
                    1_000.0 * each(spent.server),
                    1_000.0 * each(spent.database),
                    1_000.0 * each(spent.bench),
                    spent.peak_mib
                )
            }
            None => " | | | | ".to_owned(),
        };
        let measured = if latencies.is_empty() && *per_second > 0.0 {
            format!("{per_second:.0} | | | | ")
        } else if latencies.is_empty() {
            " | | | | ".to_owned()
        } else {
            format!(
                "{per_second:.0} | {:.2} | {:.2} | {:.2} | {:.2}",
                latencies.percentile(50.0),
                latencies.percentile(90.0),
                latencies.percentile(99.0),
                latencies.max()
            )
        };
        format!(
            "| {run} | {} | {measured} | {cpu} | {} |",
            database.name(),
            self.remarks.join("; ")
        )
    }
}

/// Rows, and what makes their run void.
#[derive(Debug, Default)]
pub struct Report {
    /// The figures.
    pub rows: Vec<Row>,
    /// Why they count for nothing, if so.
    pub void: Vec<String>,
}

impl Report {
    /// Puts the verdict into the rows.
    pub fn judged(mut self) -> Self {
        if !self.void.is_empty() {
            let void = format!("**VOID**: {}", self.void.join(", "));
            for row in &mut self.rows {
                row.remarks.insert(0, void.clone());
            }
        }
        self
    }
}

/// What to know of a load beside its figures: errors, and whether it was sent as planned.
pub fn remarks(tally: &Tally, rate: Option<f64>) -> Vec<String> {
    let mut remarks = Vec::new();
    if !tally.errors.is_empty() {
        remarks.push(format!(
            "**errors**, so the latencies are suspect: {}",
            counts(&tally.errors)
        ));
    }
    if rate.is_some() {
        let [usual, late] = [50.0, 99.0].map(|percent| tally.waits.percentile(percent));
        let why = if late > 1.0 {
            ": no free connection, or a busy machine"
        } else {
            ""
        };
        remarks.push(format!(
            "sent p50 {usual:.2} ms, p99 {late:.2} ms after it was due (counted){why}"
        ));
    }
    remarks
}

/// `3 × one, 1 × other`.
pub fn counts(by_kind: &BTreeMap<String, u64>) -> String {
    by_kind
        .iter()
        .map(|(kind, count)| format!("{} × {kind}", thousands(*count)))
        .collect::<Vec<_>>()
        .join(", ")
}
