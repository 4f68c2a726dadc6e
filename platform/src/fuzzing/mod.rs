//! What must hold for whatever bytes come in: one function per fuzz target, and the same in the tests.
//!
//! Each function reads any bytes as a case (a header's values, a cursor and a change to it, a stored
//! answer) and panics where a promise does not hold. libFuzzer calls them from `fuzz/`, steered by
//! coverage and for as long as one likes. The tests at the end call them a bounded number of times, on
//! bytes of chance and on changed seeds. A seed is a file in `fuzz/seeds/TARGET`, for both of them:
//! whatever was found once is put there, and every run of the tests tries it again.
//!
//! Only tests and fuzz builds have this room, so it may import from every floor and nobody from it.

mod cursor;
mod headers;
mod key;
mod problem;
mod record;

pub use self::{
    cursor::cursor, headers::headers, key::idempotency_key, problem::problem_body, record::record,
};

use std::borrow::Cow;

/// The bytes of a case, taken off from the front; what is missing at the end is zero.
struct Input<'d>(&'d [u8]);

impl<'d> Input<'d> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let (taken, rest) = self.0.split_at(N.min(self.0.len()));
        self.0 = rest;
        let mut array = [0; N];
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// What stands before the next line break.
    fn line(&mut self) -> &'d [u8] {
        let end = self.0.iter().position(|byte| *byte == b'\n');
        let (line, rest) = match end {
            Some(end) => (&self.0[..end], &self.0[end + 1..]),
            None => (self.0, &[][..]),
        };
        self.0 = rest;
        line
    }

    fn text(&mut self) -> Cow<'d, str> {
        String::from_utf8_lossy(self.line())
    }

    fn rest(&mut self) -> &'d [u8] {
        std::mem::take(&mut self.0)
    }

    /// `original` with a few bytes in one place cut out, and the next line put in.
    fn spliced(&mut self, original: &[u8]) -> Vec<u8> {
        let start = usize::from(u16::from_be_bytes(self.array())) % (original.len() + 1);
        let end = (start + usize::from(self.byte() % 16)).min(original.len());
        [&original[..start], self.line(), &original[end..]].concat()
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt, fs, path::Path};

    use proptest::prelude::*;

    /// Bytes that are shown as they can be written into a seed.
    #[derive(Clone)]
    struct Case(Vec<u8>);

    impl fmt::Debug for Case {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "b\"{}\"", self.0.escape_ascii())
        }
    }

    /// A target's seeds.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fuzz/seeds")
            .join(target);
        let mut files: Vec<_> = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        assert!(!files.is_empty(), "{target} has no seed");
        files.iter().map(|file| fs::read(file).unwrap()).collect()
    }

    /// Bytes of chance, or a seed with up to three places overwritten, cut out or filled in.
    fn cases(target: &str) -> impl Strategy<Value = Case> + use<> {
        let few = || {
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..6),
                prop::collection::vec(
                    prop::sample::select(&b"\n\r\t \0,:;/~\"\\`{}[]0A9z-_=+\x7f\xff"[..]),
                    0..6
                ),
            ]
        };
        let change = (any::<prop::sample::Index>(), 0..8_usize, few());
        let changed = (
            prop::sample::select(seeds(target)),
            prop::collection::vec(change, 0..4),
        )
            .prop_map(|(mut bytes, changes)| {
                for (start, len, by) in changes {
                    let start = start.index(bytes.len() + 1);
                    let end = (start + len).min(bytes.len());
                    bytes.splice(start..end, by);
                }
                bytes
            });
        prop_oneof![
            1 => prop::collection::vec(any::<u8>(), 0..256),
            4 => changed,
        ]
        .prop_map(Case)
    }

    macro_rules! hold {
        ($($promise:ident: $target:ident;)*) => {
            $(
                #[test]
                fn $promise() {
                    for seed in seeds(stringify!($target)) {
                        super::$target(&seed);
                    }
                    let config = ProptestConfig {
                        cases: 512,
                        // What was found is kept as a seed.
                        failure_persistence: None,
                        ..ProptestConfig::default()
                    };
                    proptest!(config, |(case in cases(stringify!($target)))| {
                        super::$target(&case.0);
                    });
                }
            )*
        };
    }

    hold! {
        a_key_has_one_stored_spelling_whatever_the_header_says: idempotency_key;
        a_cursor_reads_back_in_its_one_spelling_and_a_query_is_read_or_refused: cursor;
        an_error_is_a_problem_body_whose_pointers_name_what_is_in_the_request: problem_body;
        a_header_that_is_let_through_can_be_sent_and_no_wait_is_cut_short: headers;
        a_stored_answer_reads_back_whole_or_not_at_all: record;
    }
}
