//! What a rank reads from TCP: messages of other ranks, and the introductions of callers.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use comm::bootstrap::Place;
use comm::frames;
use comm::secret::Secret;
use comm::tcp::TcpCommunicator;

use crate::mutate;
use crate::outcome::Outcome;
use crate::rng::Rng;
use crate::target::{Depth, Pool, Target};

/// Largest length of a message in bytes that these tests accept.
const LONGEST: u64 = 1 << 32;

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Writes another number over one of an input's 64-bit words.
fn one_word(input: &mut [u8], rng: &mut Rng) {
    let count = input.len() / 8;
    if count > 0 {
        let at = 8 * rng.below(count.min(6));
        let mut old = [0; 8];
        old.copy_from_slice(&input[at..at + 8]);
        let new = mutate::number(&u64::from_le_bytes(old).to_string(), rng);
        let new: u64 = new.parse().unwrap_or(u64::MAX);
        input[at..at + 8].copy_from_slice(&new.to_le_bytes());
    }
}

fn mutated(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    let mut input = pool.pick(rng).to_vec();
    if rng.percent(60) {
        one_word(&mut input, rng);
        return input;
    }
    mutate::bytes(&input, rng)
}

/// Fuzzes the messages of a connection.
pub(super) fn frames() -> Target {
    Target::new("tcp-frames", frames_seeds, mutated, frames_read)
}

fn frames_seeds() -> Vec<Vec<u8>> {
    let message = |channel, data: &[u8]| [words(&[channel, data.len() as u64]), data.to_vec()];
    vec![
        message(7, b"").concat(),
        message(3, &[1; 40]).concat(),
        [message(1, b"one").concat(), message(2, b"two").concat()].concat(),
        message(u64::MAX, b"out of memory").concat(),
        message(u64::MAX - 1, b"").concat(),
    ]
}

fn frames_read(input: &[u8], _: Depth) -> Outcome {
    let mut rest = input;
    let mut messages = 0;
    while !rest.is_empty() {
        let before = rest.len();
        match frames::read(&mut rest, LONGEST) {
            Ok((_, data)) => {
                messages += 1;
                if before - rest.len() != 16 + data.len() {
                    let mut outcome = Outcome::accepted("");
                    outcome.expect(false, || "bytes are lost between messages".to_owned());
                    return outcome;
                }
            }
            Err(error) => {
                // A complete header counts as valid syntax; a bad value in it is refused.
                let class = Outcome::refused(&error);
                return Outcome {
                    syntax: before >= 16,
                    ..class
                };
            }
        }
    }
    Outcome::accepted(format!("{} messages", messages.min(4)))
}

/// Starts a rank that waits for a second one, which never comes; returns the port it listens on.
fn door() -> Option<u16> {
    static PORT: OnceLock<Option<u16>> = OnceLock::new();
    let open = || {
        let free = TcpListener::bind("127.0.0.1:0").ok()?;
        let port = free.local_addr().ok()?.port();
        drop(free);
        let secret = Secret::new("nobody in this test knows it").ok()?;
        let place = Place::of_this_host(0, 2, port, secret);
        std::thread::spawn(move || TcpCommunicator::join(&place, Duration::from_secs(1 << 20)));
        // Returns only once the rank listens.
        for _ in 0..1000 {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(port);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    };
    *PORT.get_or_init(open)
}

/// Bytes of a challenge: a random number for this caller, then the listener's own proof.
const CHALLENGE: usize = 64;

/// Fuzzes what a caller sends to a rank that waits for others.
pub(super) fn admissions() -> Target {
    Target::new("tcp-admissions", admissions_seeds, mutated, admissions_read)
}

fn admissions_seeds() -> Vec<Vec<u8>> {
    let hello = |rank, world, to, port| {
        [
            b"vescale2".to_vec(),
            words(&[rank, world, to, port]),
            vec![9; 32],
        ]
        .concat()
    };
    let with_proof = |hello: Vec<u8>| [hello, vec![0; 32]].concat();
    vec![
        hello(1, 2, 0, 4000),
        with_proof(hello(1, 2, 0, 4000)),
        with_proof(hello(7, 2, 0, 1)),
        with_proof(hello(0, 9, 1, 65535)),
        b"GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n".to_vec(),
        [b"vescale1".to_vec(), words(&[1, 2])].concat(),
    ]
}

fn admissions_read(input: &[u8], _: Depth) -> Outcome {
    let Some(port) = door() else {
        return Outcome::malformed(&"no port");
    };
    let mut outcome = Outcome::default();
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
        outcome.expect(false, || "the door is shut".to_owned());
        return outcome;
    };
    // The rank may close the connection before all is sent.
    let _ = stream
        .write_all(input)
        .and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
    let mut answer = Vec::new();
    let end = stream.take(1 << 12).read_to_end(&mut answer);
    outcome.syntax = input.len() >= 72 && input.starts_with(b"vescale2");
    outcome.accepted = answer.len() >= CHALLENGE;
    outcome.class = format!("{} bytes, {:?}", answer.len(), end.err().map(|e| e.kind()));
    outcome.expect(answer.len() <= CHALLENGE, || {
        format!("a stranger was answered with {} bytes", answer.len())
    });
    outcome
}
