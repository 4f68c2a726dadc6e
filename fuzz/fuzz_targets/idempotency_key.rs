#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| botix::fuzzing::idempotency_key(data));
