//! The condition of nodes: speed and jitter, after a cluster's name and in cluster files.

use catalog::condition::jittering;

fn cluster(arg: &str) -> catalog::Cluster {
    catalog::load::cluster(arg).expect(arg)
}

fn condition(of: &catalog::Cluster) -> [Option<f64>; 2] {
    [&of.speed, &of.jitter].map(|share| share.as_ref().map(|share| share.value))
}

#[test]
fn a_line_says_speed_and_jitter() {
    for (line, says) in [
        ("dgx-h100", [None, None]),
        ("dgx-h100 at 0.8", [Some(0.8), None]),
        ("dgx-h100 at 80%", [Some(0.8), None]),
        ("dgx-h100 with 2% jitter", [None, Some(0.02)]),
        ("dgx-h100 at 0.8 with 0.07 jitter", [Some(0.8), Some(0.07)]),
        (
            "h100-sxm x 4 per node, 200 Gb/s x 4 at 0.9 with 1% jitter",
            [Some(0.9), Some(0.01)],
        ),
    ] {
        let found = cluster(line);
        assert_eq!(condition(&found), says, "{line}");
        // The name that it is shown by means the same cluster.
        assert_eq!(cluster(&found.name), found, "{line}");
    }
}

#[test]
fn the_jitter_of_a_flag_stands_for_that_of_the_line() {
    for (line, expected) in [
        ("dgx-h100", "dgx-h100 with 3% jitter"),
        (
            "dgx-h100 at 0.8 with 2% jitter",
            "dgx-h100 at 0.8 with 3% jitter",
        ),
        (
            "8 x dgx-h100 + 8 x dgx-a100 at 0.5 with 9% jitter, 10 Gb/s between, 5 ms away",
            "8 x dgx-h100 with 3% jitter + 8 x dgx-a100 at 0.5 with 3% jitter, 10 Gb/s between, 5 ms away",
        ),
    ] {
        assert_eq!(jittering(line, 0.03).expect(line), expected);
        cluster(expected);
    }
}

#[test]
fn files_say_speed_and_jitter() {
    let folder = std::env::temp_dir().join(format!("vescale-condition-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("ours.yaml");
    let write = |jitter: &str| {
        let text = format!(
            "schema_version: 1\nname: ours\nextends: dgx-h100\n\
             speed: {{value: 0.9, origin: measured, source: nvidia-smi}}\n\
             jitter: {{value: {jitter}, origin: measured, source: our timers}}\n"
        );
        std::fs::write(&path, text).expect("written");
        catalog::load::cluster(&path.display().to_string())
    };
    let found = write("0.03").expect("a cluster");
    assert_eq!(condition(&found), [Some(0.9), Some(0.03)]);
    let wrong = write("-0.03").expect_err("negative").to_string();
    assert!(
        wrong.contains("jitter") && wrong.contains("from 0 to below 1"),
        "{wrong}"
    );
    std::fs::remove_dir_all(folder).expect("removed");
}
