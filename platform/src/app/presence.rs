//! Presence: whether other processes work on an SQLite file.
//!
//! On PostgreSQL a worker is dead when it has said nothing for a while; nothing else is known of other
//! machines. An SQLite file is this machine's, and its system knows who lives: every process that works on
//! it holds a lock on a file beside it, which ends with the process, however that ends. Whoever finds
//! nobody there need not wait to take up what the last one left.

use std::{
    ffi::OsString,
    fs::{File, TryLockError},
    io,
    path::Path,
};

/// The lock of this process; it ends when this is dropped.
pub(super) struct Presence(File);

/// Who else is there.
pub(super) enum Others {
    /// Nobody; none will be until [`Presence::share`].
    None(Presence),
    /// Some, beside whom this one works.
    Some(Presence),
}

impl Presence {
    /// Says that this process works on the database at `path`, and finds out who else does.
    pub(super) fn announce(path: &Path) -> io::Result<Others> {
        // However each of them writes its name.
        let mut beside = OsString::from(path.canonicalize()?);
        beside.push("-workers");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(beside)?;
        match file.try_lock() {
            Ok(()) => Ok(Others::None(Self(file))),
            Err(TryLockError::WouldBlock) => {
                file.lock_shared()?;
                Ok(Others::Some(Self(file)))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Lets others in.
    pub(super) fn share(&self) -> io::Result<()> {
        self.0.lock_shared()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_alone_until_it_shares_and_the_last_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("botix.db");
        File::create(&path).unwrap();
        let Others::None(first) = Presence::announce(&path).unwrap() else {
            panic!("nobody was there");
        };
        first.share().unwrap();
        let Others::Some(second) = Presence::announce(&path).unwrap() else {
            panic!("the first is there");
        };
        drop(first);
        assert!(matches!(Presence::announce(&path), Ok(Others::Some(_))));
        drop(second);
        assert!(matches!(Presence::announce(&path), Ok(Others::None(_))));
    }
}
