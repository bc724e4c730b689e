//! Ranks over TCP: what they do when all is well, when a rank fails or hangs, and when strangers come.

use std::io::{Read, Write};
use std::net::TcpListener;

use super::*;
use crate::Group;
use crate::secret::Secret;

const PATIENT: Duration = Duration::from_secs(20);

/// A port that is currently free.
fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

fn secret(text: &str) -> Secret {
    Secret::new(text).expect("long enough")
}

fn place(rank: usize, world: usize, port: u16) -> Place {
    Place::of_this_host(rank, world, port, secret("the secret of these tests"))
}

/// Runs `work` as every rank of a world, starting the last rank first.
fn world<T: Send>(
    size: usize,
    timeout: Duration,
    work: impl Fn(TcpCommunicator) -> T + Sync,
) -> Vec<T> {
    let port = port();
    let work = &work;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .rev()
            .map(|rank| {
                scope.spawn(move || {
                    let comm = TcpCommunicator::join(&place(rank, size, port), timeout);
                    work(comm.expect("all ranks come"))
                })
            })
            .collect();
        let join = |handle: std::thread::ScopedJoinHandle<'_, T>| handle.join().expect("runs");
        ranks.into_iter().rev().map(join).collect()
    })
}

#[test]
fn collectives_reach_everyone() {
    for size in [1, 2, 5] {
        let sums = world(size, PATIENT, |comm| {
            let group = Group {
                ranks: (0..comm.world()).collect(),
                index: comm.rank(),
                channel: 7,
            };
            let mut data: Vec<f32> = (0..1000).map(|i| (i * comm.rank()) as f32).collect();
            group.all_reduce(&comm, "test", &mut data).expect("sums");
            let own = Arc::new(vec![comm.rank() as u8; 3]);
            comm.send(comm.rank(), 9, "test", Arc::clone(&own))
                .expect("sends");
            assert_eq!(comm.receive(comm.rank(), 9, "test"), Ok(own));
            // All send before any receives: more than connections buffer.
            let much = Arc::new(vec![comm.rank() as u8; 8 << 20]);
            let all = group.all_gather(&comm, "much", much).expect("sends");
            for (rank, part) in all.wait(&comm).expect("comes").iter().enumerate() {
                assert!(part.len() == 8 << 20 && part.iter().all(|&b| b == rank as u8));
            }
            group.barrier(&comm).expect("meets");
            data
        });
        let ranks = size * (size - 1) / 2;
        for data in sums {
            assert!((0..1000).all(|i| data[i] == (i * ranks) as f32));
        }
    }
}

#[test]
fn a_failed_rank_stops_the_others() {
    let errors = world(3, PATIENT, |comm| {
        if comm.rank() == 1 {
            comm.fail("no memory");
            return None;
        }
        Some(comm.receive(1, 3, "waiting"))
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let Some(error) = error else { continue };
        let expected = CommError::PeerFailed {
            rank,
            collective: "waiting".to_owned(),
            failed: 1,
            reason: "no memory".to_owned(),
        };
        assert_eq!(error, Err(expected));
    }
}

/// Rank 1 stops reading. Rank 0's send does not wait for it; the timeout ends the job with an error
/// that names rank 1, and rank 2 is told at once.
#[test]
fn a_rank_that_takes_nothing_is_named_in_time() {
    let timeout = Duration::from_secs(1);
    let port = port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = [0, 2]
            .map(|rank| {
                scope.spawn(move || {
                    let comm = TcpCommunicator::join(&place(rank, 3, port), timeout);
                    let comm = comm.expect("all come");
                    let began = Instant::now();
                    if rank == 0 {
                        let much = Arc::new(vec![0; 50 << 20]);
                        comm.send(1, 5, "gradients", much).expect("is queued");
                        assert!(began.elapsed() < timeout / 2, "sending waits for nobody");
                    }
                    let failed = loop {
                        if let Err(error) = comm.check("working") {
                            break error;
                        }
                        assert!(began.elapsed() < 3 * timeout, "rank {rank} hangs");
                        std::thread::sleep(Duration::from_millis(10));
                    };
                    comm.fail(&failed.to_string());
                    drop(comm);
                    (failed.to_string(), began.elapsed())
                })
            })
            .into_iter()
            .collect();
        // A process that meets the others and then stops: its streams stay open, and nobody reads them.
        let hung = crate::meeting::meet(&place(1, 3, port), PATIENT).expect("all come");
        for (rank, handle) in [0, 2].into_iter().zip(ranks) {
            let (said, took) = handle.join().expect("runs");
            assert!(
                took < timeout + Duration::from_secs(2),
                "rank {rank}: {took:?}"
            );
            assert!(said.contains("rank 1 failed"), "rank {rank}: {said}");
            assert!(said.contains("did not take a message"), "{said}");
        }
        drop(hung);
    });
}

#[test]
fn a_silent_rank_is_named_in_time() {
    let timeout = Duration::from_millis(600);
    let said = world(2, timeout, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(2 * timeout);
            return comm.check("sleeping").map(|()| Message::default());
        }
        let answer = comm.receive(1, 3, "waiting");
        comm.fail("waited");
        answer
    });
    let error = said[0].clone().expect_err("nothing comes").to_string();
    assert!(
        error.contains("waited 0.6 s for rank 1 in waiting"),
        "{error}"
    );
    let error = said[1].clone().expect_err("is told").to_string();
    assert!(error.contains("rank 0 failed: waited"), "{error}");
}

#[test]
fn ranks_that_do_not_come_are_not_waited_for() {
    let port = port();
    let wait = Duration::from_millis(200);
    for (rank, said) in [
        (0, "0 of 1 ranks came in time"),
        (1, "rank 0 did not answer"),
    ] {
        let result = TcpCommunicator::join(&place(rank, 2, port), wait);
        let error = result.err().expect("nobody comes").to_string();
        assert!(error.contains(said), "{error}");
    }
}

fn connect(port: u16) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            return stream;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a stranger says first, and whether it stays.
const STRANGERS: [(&str, &[u8]); 6] = [
    ("silent", b""),
    ("half a greeting", b"vesc"),
    (
        "an older version",
        b"vescale1\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0",
    ),
    ("zeros", &[0; 200]),
    ("a browser", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ("much", &[0x16; 4096]),
];

#[test]
fn strangers_hold_up_nobody() {
    let port = port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || TcpCommunicator::join(&place(0, 2, port), PATIENT));
        let began = Instant::now();
        // All of them stay connected.
        let strangers: Vec<TcpStream> = STRANGERS
            .iter()
            .map(|(_, says)| {
                let mut stream = connect(port);
                // One may be turned away before it has said everything.
                let _ = stream.write_all(says);
                stream
            })
            .collect();
        let second = TcpCommunicator::join(&place(1, 2, port), PATIENT).expect("meets");
        let first = first.join().expect("runs").expect("meets");
        assert!(began.elapsed() < Duration::from_secs(2));
        let message = Arc::new(vec![4, 5]);
        first
            .send(1, 0, "test", Arc::clone(&message))
            .expect("sends");
        assert_eq!(second.receive(0, 0, "test"), Ok(message));
        drop(strangers);
    });
}

/// Ranks of another job, or of this one by mistake: each is turned away, the job goes on, and each learns why.
#[test]
fn only_ranks_of_the_job_take_part() {
    let wait = Duration::from_millis(2500);
    let port = port();
    let other_secret = |rank| Place {
        secret: secret("another secret than theirs"),
        ..place(rank, 3, port)
    };
    let wrong = [
        (other_secret(1), "does not know the job's secret"),
        (other_secret(2), "does not know the job's secret"),
        (place(7, 9, port), "another number of ranks"),
        (place(1, 2, port), "another number of ranks"),
    ];
    std::thread::scope(|scope| {
        let first = scope.spawn(move || TcpCommunicator::join(&place(0, 3, port), PATIENT));
        drop(connect(port));
        for (place, said) in &wrong {
            let error = TcpCommunicator::join(place, wait).err();
            let error = error.expect("is turned away").to_string();
            assert!(error.contains(said), "{place}: {error}");
        }
        // Two processes of one rank: the first that comes stays.
        let both = [(); 2]
            .map(|()| scope.spawn(move || TcpCommunicator::join(&place(1, 3, port), PATIENT)));
        // One is turned away while the others still meet; once they have met nobody listens.
        while !both.iter().any(std::thread::ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let third = TcpCommunicator::join(&place(2, 3, port), PATIENT).expect("meets");
        let first = first.join().expect("runs").expect("meets");
        let both = both.map(|process| process.join().expect("runs"));
        let refused = both.iter().find_map(|joined| joined.as_ref().err());
        let error = refused.expect("one of them is").to_string();
        assert!(
            error.contains("has met another process of this rank"),
            "{error}"
        );
        let second = both.iter().find_map(|joined| joined.as_ref().ok());
        let second = second.expect("the other came");
        first.send(2, 0, "test", Message::default()).expect("sends");
        third.receive(0, 0, "test").expect("comes");
        second.check("test").expect("goes on");
    });
}

/// If the last attempt to reach a rank times out, the error still gives the reason that an earlier attempt failed for.
#[test]
fn silence_hides_no_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("its address").port();
    std::thread::spawn(move || {
        let mut silent = Vec::new();
        for (nth, stream) in listener.incoming().flatten().enumerate() {
            if nth == 0 {
                let mut hello = [0; 72];
                let _ = (&stream).read_exact(&mut hello);
                let _ = (&stream).write_all(&[0; 64]);
            }
            silent.push(stream);
        }
    });
    let joined = TcpCommunicator::join(&place(1, 2, port), Duration::from_millis(400));
    let error = joined.err().expect("nobody answers").to_string();
    assert!(error.contains("does not know the job's secret"), "{error}");
}

#[test]
fn who_was_turned_away_is_said_when_ranks_are_missing() {
    let port = port();
    let wait = Duration::from_secs(2);
    std::thread::scope(|scope| {
        let first = scope.spawn(move || TcpCommunicator::join(&place(0, 2, port), wait));
        let mut stream = connect(port);
        stream.write_all(STRANGERS[4].1).expect("writes");
        // The answer is that the connection ends.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
        let error = first.join().expect("runs").err().expect("nobody came");
        let error = error.to_string();
        assert!(error.contains("0 of 1 ranks came in time"), "{error}");
        assert!(error.contains("turned away: 127.0.0.1:"), "{error}");
        assert!(error.contains("did not greet as a rank"), "{error}");
    });
}

/// An earlier, abandoned attempt of a rank to join does not keep the rank out.
#[test]
fn a_rank_that_hung_up_comes_again() {
    let port = port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || TcpCommunicator::join(&place(0, 3, port), PATIENT));
        let wait = Duration::from_millis(400);
        // It comes, waits for rank 2 in vain, and gives up.
        let error = TcpCommunicator::join(&place(1, 3, port), wait).err();
        assert!(error.is_some());
        let second = scope.spawn(move || TcpCommunicator::join(&place(1, 3, port), PATIENT));
        let third = scope.spawn(move || TcpCommunicator::join(&place(2, 3, port), PATIENT));
        for rank in [first, second, third] {
            rank.join().expect("runs").expect("meets");
        }
    });
}

/// Nobody from outside can connect to ranks of one host.
#[test]
fn ranks_of_one_host_listen_on_loopback_only() {
    let outside = {
        let probe = std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket");
        let _ = probe.connect("192.0.2.1:9");
        probe.local_addr().ok().map(|address| address.ip())
    };
    let Some(outside) = outside.filter(|ip| !ip.is_loopback() && !ip.is_unspecified()) else {
        return;
    };
    let port = port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || TcpCommunicator::join(&place(0, 2, port), PATIENT));
        drop(connect(port));
        assert!(TcpStream::connect((outside, port)).is_err());
        let second = TcpCommunicator::join(&place(1, 2, port), PATIENT);
        second.expect("meets");
        first.join().expect("runs").expect("meets");
    });
}
