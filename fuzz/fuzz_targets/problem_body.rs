#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| botix::fuzzing::problem_body(data));
