//! The machine, in the words that a figure needs beside it.

use std::fs;

/// Processor, cores, memory, kernel, and the file system that databases are made on.
pub fn describe() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .map(|rest| rest.trim_start_matches([':', ' ', '\t']).trim().to_owned())
    };
    let processor = value(&read("/proc/cpuinfo"), "model name");
    let memory_kib: u64 = value(&read("/proc/meminfo"), "MemTotal")
        .and_then(|text| text.trim_end_matches(" kB").parse().ok())
        .unwrap_or(0);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{cores} cores of {}, {} GiB, Linux {}, databases on {}",
        processor.as_deref().unwrap_or("an unknown processor"),
        memory_kib.div_ceil(1 << 20),
        read("/proc/sys/kernel/osrelease").trim(),
        file_system(&read("/proc/mounts")).unwrap_or_else(|| "an unknown file system".to_owned())
    )
}

/// The type of the file system that temporary folders are on: `tmpfs` makes durability free.
fn file_system(mounts: &str) -> Option<String> {
    let folder = std::env::temp_dir().canonicalize().ok()?;
    mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            Some((fields.next()?, fields.next()?))
        })
        .filter(|(point, _)| folder.starts_with(point))
        .max_by_key(|(point, _)| point.len())
        .map(|(_, kind)| kind.to_owned())
}
