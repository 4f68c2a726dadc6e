//! The changelog: the releases with their dates, each with what it brought and what it deprecated.
//!
//! The one source of the page, its JSON and its feed. What is deprecated announces itself: an entry is
//! made from its declaration, under the release that deprecated it. A release stands here before it is
//! published, the newest first; its date is the one that deprecations count their notice from.

use time::{Date, Month, macros::date};

use crate::contract::deprecation::Deprecation;

/// How long a deprecated thing stays, in months, unless its declaration says otherwise.
const NOTICE: u8 = 6;

/// A release.
#[derive(Debug, PartialEq, Eq)]
pub struct Release {
    /// Its version.
    pub version: &'static str,
    /// The day it was published, in UTC.
    pub date: Date,
    /// What it brought, a sentence each.
    pub changes: &'static [&'static str],
}

/// The first release.
pub static V0_1_0: Release = Release {
    version: "0.1.0",
    date: date!(2026 - 12 - 01),
    changes: &[
        "Mutations take an `Idempotency-Key` and replay their first answer for 24 hours.",
        "Lists walk by signed cursors, at the same cost on every page.",
        "Webhooks are signed, tried again by a ladder of five attempts, and kept as dead letters.",
        "Plugins transform and sign webhooks on their way out.",
        "Bins of the inspector receive anything and show it.",
    ],
};

/// Every release, the newest first.
pub static RELEASES: [&Release; 1] = [&V0_1_0];

impl Release {
    /// The last day of what this release deprecates: six months later.
    pub fn end_of_notice(&self) -> Date {
        let month = u8::from(self.date.month()) - 1 + NOTICE;
        let year = self.date.year() + i32::from(month / 12);
        let month = Month::try_from(month % 12 + 1).unwrap_or(Month::December);
        let day = self.date.day().min(month.length(year));
        Date::from_calendar_date(year, month, day).unwrap_or(Date::MAX)
    }

    /// Its anchor in the changelog.
    pub fn anchor(&self) -> String {
        format!("v{}", self.version)
    }

    /// What it deprecated.
    pub fn deprecated<'d>(&self, all: &'d [Deprecation]) -> impl Iterator<Item = &'d Deprecation> {
        all.iter()
            .filter(|deprecation| deprecation.since.version == self.version)
    }
}

#[cfg(test)]
mod tests {
    use time::{Date, macros::date};

    use super::{RELEASES, Release};

    #[test]
    fn the_newest_release_is_this_program() {
        assert_eq!(RELEASES[0].version, env!("CARGO_PKG_VERSION"));
        assert!(RELEASES.is_sorted_by(|newer, older| newer.date >= older.date));
    }

    #[test]
    fn notice_ends_six_months_later_or_on_the_last_day_of_that_month() {
        let end = |date: Date| {
            let release = Release {
                version: "1",
                date,
                changes: &[],
            };
            release.end_of_notice()
        };
        assert_eq!(end(date!(2026 - 12 - 01)), date!(2027 - 06 - 01));
        assert_eq!(end(date!(2026 - 06 - 30)), date!(2026 - 12 - 30));
        assert_eq!(end(date!(2027 - 08 - 31)), date!(2028 - 02 - 29));
    }
}
