//! Clusters of several pools, as they are written on one line.

use catalog::Pools;

fn pools(line: &str) -> std::sync::Arc<Pools> {
    let cluster = catalog::load::cluster(line).expect("a cluster");
    cluster.pools.expect("pools")
}

#[test]
fn a_line_is_read_back_as_it_is_written() {
    for line in [
        "64 x dgx-a100 + 32 x dgx2-v100",
        "64 x dgx-a100 + 32 x dgx2-v100, 100 Gb/s between",
        "64 x dgx-a100 + 64 x dgx-a100, 10 Gb/s between, 20 ms away",
        "8 x dgx-h100 + 8 x dgx-a100 + 16 x dgx2-v100 + 8 x dgx-h200",
    ] {
        let cluster = catalog::load::cluster(line).expect("a cluster");
        assert_eq!(cluster.name, line);
        for pool in pools(line).arrangements() {
            let again = catalog::load::cluster(&pool.arg).expect("a cluster");
            assert_eq!(again, pool.cluster, "{}", pool.arg);
        }
    }
}

#[test]
fn alike_neighbours_on_one_network_are_one() {
    for (line, one) in [
        ("16 x dgx-h100 + 16 x dgx-h100", "dgx-h100"),
        (
            "8 x dgx-h100 + 8 x dgx-h100 + 8 x dgx-a100",
            "16 x dgx-h100 + 8 x dgx-a100",
        ),
        (
            "8 x dgx-h100 + 8 x dgx-a100 + 8 x dgx-h100",
            "8 x dgx-h100 + 8 x dgx-a100 + 8 x dgx-h100",
        ),
        (
            "8 x dgx-h100 + 8 x dgx-h100, 10 Gb/s between",
            "8 x dgx-h100 + 8 x dgx-h100, 10 Gb/s between",
        ),
    ] {
        let cluster = catalog::load::cluster(line).expect("a cluster");
        let wanted = catalog::load::cluster(one).expect("a cluster");
        assert_eq!(cluster.with_alike_pools_as_one(), wanted, "{line}");
    }
}

#[test]
fn sizes_are_those_that_all_pools_have_in_common() {
    let cluster = catalog::load::cluster("24 x dgx-h100 + 32 x dgx2-v100").expect("a cluster");
    assert_eq!((cluster.gpus_per_node, cluster.scale_up_domain), (8, 8));
    assert_eq!(cluster.max_gpus, Some(56));
    assert!(cluster.check_devices(56).is_ok());
    let wrong = cluster.check_devices(48).expect_err("all are planned for");
    assert!(wrong.contains("has 56"), "{wrong}");
}

#[test]
fn pools_are_used_in_every_order_and_left_out() {
    let names = |line: &str| -> Vec<String> {
        let all = pools(line).arrangements().into_iter();
        all.map(|pool| format!("{} of {}", pool.gpus, pool.arg))
            .collect()
    };
    assert_eq!(
        names("8 x dgx-a100 + 16 x dgx2-v100, 10 Gb/s between"),
        [
            "24 of 8 x dgx-a100 + 16 x dgx2-v100, 10 Gb/s between",
            "24 of 16 x dgx2-v100 + 8 x dgx-a100, 10 Gb/s between",
            "8 of dgx-a100",
            "16 of dgx2-v100",
        ]
    );
    // Equal pools on one network are one pool.
    assert_eq!(
        names("8 x dgx-a100 + 8 x dgx-a100"),
        ["16 of dgx-a100", "8 of dgx-a100"]
    );
    // On two sites they make the same cluster in both orders.
    assert_eq!(
        names("8 x dgx-a100 + 8 x dgx-a100, 10 Gb/s between").len(),
        2
    );
    assert_eq!(
        names("8 x dgx-a100 + 8 x dgx-h100 + 8 x dgx-h200").len(),
        15
    );
}

#[test]
fn pools_are_divided_into_groups_in_every_way() {
    let names = |line: &str| -> Vec<String> {
        let all = pools(line).divisions().into_iter();
        let named = all.map(|groups| {
            let groups = groups
                .iter()
                .map(|pool| format!("{} of {}", pool.gpus, pool.arg));
            groups.collect::<Vec<_>>().join(" | ")
        });
        named.collect()
    };
    assert_eq!(
        names("8 x dgx-a100 + 16 x dgx2-v100"),
        ["8 of dgx-a100 | 16 of dgx2-v100"]
    );
    assert_eq!(
        names("8 x dgx-a100 + 8 x dgx-h100 + 8 x dgx-h200").len(),
        // All three apart; one apart from two in either order; two of three.
        1 + 3 * 2 + 3
    );
    let four = names("8 x dgx-a100 + 8 x dgx-h100 + 8 x dgx-h200 + 16 x dgx2-v100");
    assert_eq!(four.len(), 83);
    let distinct: std::collections::BTreeSet<_> = four.iter().collect();
    assert_eq!(distinct.len(), 83);
    assert!(names("8 x dgx-a100 + 8 x dgx-a100").is_empty());
    assert_eq!(
        names("8 x dgx-a100 + 8 x dgx-a100, 10 Gb/s between"),
        ["8 of dgx-a100 | 8 of dgx-a100"]
    );
}

#[test]
fn pools_are_counted_in_nodes_too() {
    let found = catalog::load::cluster("3 nodes x dgx-h100 + 1 node x dgx-h100 at 0.8");
    let cluster = found.expect("a cluster");
    assert_eq!(cluster.name, "24 x dgx-h100 + 8 x dgx-h100 at 0.8");
    let slow = &cluster.pools.as_ref().expect("pools").parts[1];
    assert_eq!(
        slow.cluster.speed.as_ref().map(|speed| speed.value),
        Some(0.8)
    );
    assert_eq!(slow.cluster.device, cluster.device);
}

#[test]
fn pipeline_ranks_lie_in_one_pool_each() {
    let pools = pools("16 x dgx-a100 + 32 x dgx2-v100");
    for (ranks, owners) in [
        (3, Some(vec![0, 1, 1])),
        (6, Some(vec![0, 0, 1, 1, 1, 1])),
        (1, None),
        (2, None),
        (5, None),
        (0, None),
    ] {
        assert_eq!(pools.of_pipeline(ranks), owners, "{ranks}");
    }
}

#[test]
fn what_is_no_pool_is_refused_with_its_place() {
    for (line, what) in [
        ("8 x dgx-a100 + ", "`` is not a pool"),
        ("8 x dgx-a100 + dgx-h100", "`dgx-h100` is not a pool"),
        ("8 x dgx-a100 + 0 x dgx-h100", "0 GPUs are out of range"),
        (
            "8 x dgx-a100 + -8 x dgx-h100",
            "`-8 x dgx-h100` is not a pool",
        ),
        (
            "8 x dgx-a100 + 12 x dgx-h100",
            "nearest numbers of GPUs in whole nodes are 8 and 16",
        ),
        ("8 x dgx-a100 + 8 x dgx-h101", "dgx-h101"),
        (
            "8 x dgx-a100 + 8 x dgx-h100, fast",
            "`fast` is not understood",
        ),
        ("8 x dgx-a100 + 8 x dgx-h100, 0 Gb/s between", "bandwidth"),
        (
            "8 x dgx-a100 + 8 x dgx-h100, 20 ms away",
            "without the bandwidth",
        ),
        (
            "8 x dgx-a100 + 8 x dgx-h100, 1 Gb/s between, 9 s away",
            "latency",
        ),
        (
            "8 x dgx-a100 + 8 x dgx-a100 + 8 x dgx-a100 + 8 x dgx-a100 + 8 x dgx-a100",
            "5 pools",
        ),
    ] {
        let error = catalog::load::cluster(line).expect_err(line).to_string();
        assert!(error.contains(what), "{line}: {error}");
    }
}

/// Pools after the loss of devices, and the first devices of pools, are clusters.
#[test]
fn parts_of_pools_are_clusters() {
    let line = "16 x dgx-h100 + 32 x dgx2-v100 + 8 x dgx-a100, 100 Gb/s between";
    let all = pools(line);
    for (lost, left) in [
        ([0, 0, 0], Some(line)),
        (
            [8, 16, 0],
            Some("8 x dgx-h100 + 16 x dgx2-v100 + 8 x dgx-a100, 100 Gb/s between"),
        ),
        ([16, 0, 8], Some("dgx2-v100")),
        (
            [0, 32, 0],
            Some("16 x dgx-h100 + 8 x dgx-a100, 100 Gb/s between"),
        ),
        ([16, 32, 8], None),
        ([17, 0, 0], None),
    ] {
        let found = all.without(&lost);
        assert_eq!(found.as_ref().map(|pool| &pool.arg[..]), left, "{lost:?}");
        let gpus = found.map_or(0, |pool| pool.gpus);
        assert!(left.is_none() || gpus == 56 - lost.iter().sum::<u64>());
    }
    for (gpus, first) in [
        (4, Ok("dgx-h100")),
        (16, Ok("dgx-h100")),
        (24, Ok("16 x dgx-h100 + 8 x dgx2-v100, 100 Gb/s between")),
        (48, Ok("16 x dgx-h100 + 32 x dgx2-v100, 100 Gb/s between")),
        (56, Ok(line)),
        (12, Err("8 and 16")),
        (40, Err("32 and 48")),
        (57, Err("1 to 56")),
        (0, Err("1 to 56")),
    ] {
        match (all.first(gpus), first) {
            (Ok(pool), Ok(arg)) => assert_eq!((&pool.arg[..], pool.gpus), (arg, gpus)),
            (Err(wrong), Err(part)) => assert!(wrong.contains(part), "{gpus}: {wrong}"),
            (found, _) => panic!("{gpus}: {found:?}"),
        }
    }
    // Neighbours that are alike and on one network become one pool when what lay between is lost.
    let joined = pools("8 x dgx-h100 + 8 x dgx-a100 + 8 x dgx-h100").without(&[0, 8, 0]);
    let joined = joined.expect("some are left");
    assert_eq!((&joined.arg[..], joined.gpus), ("dgx-h100", 16));
}

/// A pool's name is its preset, its GPU or, if two are equal, its number.
#[test]
fn pools_have_names() {
    let two = pools("16 x dgx-h100 + 8 x dgx-h100 at 0.8 + 8 x dgx-a100");
    let sites = pools("8 x dgx-a100 + 16 x dgx-a100, 100 Gb/s between");
    for (of, name, found) in [
        (&two, "dgx-h100", Ok(0)),
        (&two, "dgx-h100 at 0.8", Ok(1)),
        (&two, "a100", Ok(2)),
        (&two, "A100-80GB", Ok(2)),
        (&two, "pool 2", Ok(1)),
        (&two, "h100", Err("2 pools are called `h100`")),
        (
            &two,
            "pool 4",
            Err("one of dgx-h100 (16 GPUs), dgx-h100 at 0.8 (8 GPUs)"),
        ),
        (&two, "", Err("no pool is called")),
        (&sites, "pool 2", Ok(1)),
        (
            &sites,
            "dgx-a100",
            Err("one of pool 1 (8 GPUs of dgx-a100), pool 2 (16 GPUs"),
        ),
    ] {
        match (of.named(name), found) {
            (Ok(at), Ok(expected)) => assert_eq!(at, expected, "{name}"),
            (Err(wrong), Err(part)) => assert!(wrong.to_string().contains(part), "{wrong}"),
            (found, _) => panic!("{name}: {found:?}"),
        }
    }
    for (line, arg) in [
        ("a100", "dgx-a100"),
        ("dgx-a100 + dgx-h100", "8 x dgx-a100 + 16 x dgx-h100"),
        (
            "16 x dgx-h100 + 8 x dgx-a100",
            "16 x dgx-h100 + 8 x dgx-a100",
        ),
    ] {
        assert_eq!(two.chosen(line).expect(line).arg, arg);
    }
    assert!(two.chosen("a100 + dgx-a100").is_err());
}
