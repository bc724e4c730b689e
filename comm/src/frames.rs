//! Frames: the wire format of messages between ranks, with reads and writes that have a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Channel of the message by which a rank reports a failure.
pub(super) const FAILED: u64 = u64::MAX;
/// Channel on which a rank says that it is done.
pub(super) const DONE: u64 = u64::MAX - 1;
/// Largest size of a message in bytes: no plan sends more, and a corrupted length must not be waited for.
pub const LONGEST: u64 = 1 << 36;
/// Largest size of a failure message in bytes.
const LAST_WORDS: u64 = 1 << 16;
/// Most bytes allocated for a message before its data arrive; the rest is allocated as they do.
const AHEAD: u64 = 1 << 24;
/// Messages up to this size in bytes are written together with their header.
const SMALL: usize = 1 << 14;

/// Writes a message: its channel and length, then its bytes.
pub(super) fn write(to: &mut impl Write, channel: u64, data: &[u8]) -> io::Result<()> {
    let mut head = Vec::with_capacity(16 + if data.len() <= SMALL { data.len() } else { 0 });
    head.extend(channel.to_le_bytes());
    head.extend((data.len() as u64).to_le_bytes());
    if data.len() <= SMALL {
        head.extend(data);
        return to.write_all(&head);
    }
    to.write_all(&head)?;
    to.write_all(data)
}

/// Reads the channel and the bytes of a message of at most `longest` bytes.
///
/// # Errors
/// When the connection ends within the message, or when its length exceeds the channel's limit; that is checked before
/// memory is allocated.
pub fn read(from: &mut impl Read, longest: u64) -> io::Result<(u64, Vec<u8>)> {
    let mut word = || {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)
            .map(|()| u64::from_le_bytes(bytes))
    };
    let (channel, length) = (word()?, word()?);
    let most = match channel {
        FAILED => LAST_WORDS,
        DONE => 0,
        _ => longest,
    };
    if length > most {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message of {length} bytes, where at most {most} may come"),
        ));
    }
    let mut data = Vec::with_capacity(length.min(AHEAD) as usize);
    let read = from.take(length).read_to_end(&mut data)?;
    if (read as u64) < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((channel, data))
}

/// The message that reports a failure to a peer: the number of the failed rank, which need not be the sender, then the
/// reason, shortened to what a peer accepts.
pub(super) fn last_words(failed: usize, reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(LAST_WORDS as usize - 8);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let rank = (failed as u64).to_le_bytes();
    [&rank[..], &reason.as_bytes()[..end]].concat()
}

/// Parses a failure message of a peer: which rank failed, and why. If it names no rank of the job, the peer itself
/// failed.
pub(super) fn failure(peer: usize, world: usize, words: &[u8]) -> (usize, String) {
    let (rank, reason) = words.split_at(words.len().min(8));
    let rank: Option<[u8; 8]> = rank.try_into().ok();
    let named = rank.and_then(|rank| usize::try_from(u64::from_le_bytes(rank)).ok());
    let failed = named.filter(|&rank| rank < world).unwrap_or(peer);
    (failed, String::from_utf8_lossy(reason).into_owned())
}

/// A connection whose reads and writes fail after `until`, however slowly data trickle.
pub(super) struct Timed<'s> {
    pub(super) stream: &'s TcpStream,
    pub(super) until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }
}

/// Turns a socket's timeout (reported in one of two ways) into a retry: the deadline may not be reached yet.
fn again(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ) =>
        {
            Err(io::ErrorKind::Interrupted.into())
        }
        other => other,
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        let mut stream = self.stream;
        again(stream.read(buffer))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        let mut stream = self.stream;
        again(stream.write(data))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_as_written() {
        for length in [0, 1, SMALL, SMALL + 1, 3 * SMALL] {
            let data: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let mut bytes = Vec::new();
            write(&mut bytes, 7, &data).expect("memory");
            let read = read(&mut &bytes[..], LONGEST).expect("whole");
            assert_eq!(read, (7, data));
        }
        let words = "é".repeat(1 << 16);
        let mut bytes = Vec::new();
        write(&mut bytes, FAILED, &last_words(1, &words)).expect("memory");
        let (_, read) = read(&mut &bytes[..], 0).expect("short enough");
        assert_eq!(read.len(), 1 << 16);
        let (failed, reason) = failure(0, 3, &read);
        assert_eq!((failed, reason.chars().all(|c| c == 'é')), (1, true));
        // If no valid rank is named, the peer itself failed.
        let unknown = last_words(3, "lost");
        assert_eq!(failure(2, 3, &unknown), (2, "lost".to_owned()));
        assert_eq!(failure(2, 3, b"x"), (2, String::new()));
    }

    #[test]
    fn a_wrong_length_takes_no_memory() {
        let head =
            |channel: u64, length: u64| [channel.to_le_bytes(), length.to_le_bytes()].concat();
        for (channel, length, longest, said) in [
            (3, u64::MAX, LONGEST, "at most 68719476736 may come"),
            (3, 17, 16, "a message of 17 bytes"),
            (DONE, 1, LONGEST, "at most 0 may come"),
            (FAILED, 1 << 40, LONGEST, "at most 65536 may come"),
        ] {
            let error = read(&mut &head(channel, length)[..], longest).expect_err("too long");
            assert!(error.to_string().contains(said), "{error}");
        }
        // A valid length, but the data never come.
        let error = read(&mut &head(3, LONGEST)[..], LONGEST).expect_err("ends");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = read(&mut &head(3, 5)[..9], LONGEST).expect_err("ends");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
