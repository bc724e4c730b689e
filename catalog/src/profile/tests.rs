//! Profiles as files: what is written reads back, and what makes no sense is named.

use super::*;

fn profile() -> Profile {
    Profile {
        schema_version: SCHEMA_VERSION,
        tool_version: "0.1.0".to_owned(),
        machine: Machine {
            processor: "a \"fast\" one".to_owned(),
            cores: 4,
            memory_bytes: 1 << 34,
            gpu: None,
        },
        measured: vec![Measured {
            kernel: "matmul forward f32".to_owned(),
            sizes: vec![64, 128, 256],
            ranks: 2,
            seconds: 1.5e-4,
            spread: 0.02,
        }],
    }
}

#[test]
fn a_written_profile_reads_back() {
    let written = profile().to_yaml();
    let read = Profile::from_yaml(&written, "p.yaml").expect("reads");
    assert_eq!(read.measured, profile().measured);
    assert_eq!(read.to_yaml(), written);
}

#[test]
fn what_is_known_of_gpus_reads_back() {
    let known = Gpu {
        count: 2,
        hosts: Some(4),
        multiprocessors: 132,
        driver: Some("570.1".to_owned()),
        attention: Some("cuDNN 9.19.0".to_owned()),
        clock_mhz: Some([1500, 1830]),
        most_clock_mhz: Some(1980),
        memory_clock_mhz: Some(2619),
        power_limit_watts: Some(700),
    };
    let little = Gpu {
        count: 1,
        multiprocessors: 108,
        ..Gpu::default()
    };
    for (gpu, said) in [
        (
            known,
            "4 hosts of 2 GPUs, 1830 of 1980 MHz, 1500 at least, 700 W, driver 570.1, attention by cuDNN 9.19.0",
        ),
        (little, "1 GPU"),
    ] {
        assert_eq!(gpu.described(), said);
        let mut p = profile();
        p.machine.gpu = Some(gpu);
        let read = Profile::from_yaml(&p.to_yaml(), "p.yaml").expect("reads");
        assert_eq!(read.machine.gpu, p.machine.gpu);
    }
}

#[test]
fn measuring_again_replaces() {
    let mut p = profile();
    let mut again = p.measured[0].clone();
    again.seconds = 2e-4;
    let mut other = again.clone();
    other.ranks = 4;
    p.add([again.clone(), other.clone()]);
    assert_eq!(p.measured, [again, other]);
}

mod any {
    use proptest::prelude::*;

    use super::*;

    /// Text with characters that YAML interprets or cannot hold.
    fn text() -> impl Strategy<Value = String> {
        let odd = prop::sample::select(vec![
            "\"",
            "'",
            "\\",
            "\n",
            "\r",
            "\t",
            "\0",
            "\u{1b}[31m",
            "\u{7f}",
            "\u{85}",
            "\u{9f}",
            "\u{2028}",
            "\u{feff}",
            "\u{ffff}",
            ": ",
            " #",
            "{",
            "}",
            "[",
            "]",
            ",",
            "&a",
            "*a",
            "!!",
            "- ",
            "%",
            "é",
            "模",
            "\u{1f600}",
            "~",
            "null",
            "1e3",
            "",
        ]);
        prop::collection::vec(
            prop_oneof![
                odd.prop_map(str::to_owned),
                any::<char>().prop_map(String::from)
            ],
            0..6,
        )
        .prop_map(|parts| parts.concat())
    }

    fn number() -> impl Strategy<Value = f64> {
        prop_oneof![
            any::<f64>(),
            0.0..1.0f64,
            prop::sample::select(vec![
                f64::NAN,
                f64::INFINITY,
                -0.0,
                0.0,
                5e-324,
                1e9,
                1.5e-4
            ]),
        ]
    }

    fn measurement() -> impl Strategy<Value = Measured> {
        let sizes = prop::collection::vec(any::<u64>(), 0..4);
        (text(), sizes, any::<u64>(), number(), number()).prop_map(
            |(kernel, sizes, ranks, seconds, spread)| Measured {
                kernel,
                sizes,
                ranks,
                seconds,
                spread,
            },
        )
    }

    proptest! {
        #[test]
        fn profile_that_is_written_reads_back(
            texts in prop::collection::vec(text(), 4),
            measured in prop::collection::vec(measurement(), 0..6),
            has_gpu in any::<bool>(),
        ) {
            let mut written = profile();
            written.tool_version.clone_from(&texts[0]);
            written.machine.processor.clone_from(&texts[1]);
            written.machine.gpu = has_gpu.then(|| Gpu {
                count: 1,
                driver: Some(texts[2].clone()),
                attention: Some(texts[3].clone()),
                ..Gpu::default()
            });
            written.measured.clear();
            written.add(measured);
            let yaml = written.to_yaml();
            let read = Profile::from_yaml(&yaml, "p.yaml");
            let read = read.map_err(|e| TestCaseError::fail(format!("{e}\n{yaml}")))?;
            prop_assert_eq!(&read.tool_version, &written.tool_version);
            prop_assert_eq!(&read.machine, &written.machine);
            let names = |p: &Profile| {
                let names = p.measured.iter();
                names.map(|m| (m.kernel.clone(), m.sizes.clone(), m.ranks)).collect::<Vec<_>>()
            };
            prop_assert_eq!(names(&read), names(&written));
            prop_assert_eq!(read.to_yaml(), yaml);
        }
    }
}

#[test]
fn nonsense_is_named() {
    let check = |yaml: &str, expected: &str| {
        let error = Profile::from_yaml(yaml, "p.yaml").expect_err("refused");
        assert!(error.to_string().contains(expected), "{error}");
    };
    let good = profile().to_yaml();
    check(&good.replace("cores: 4", "cores: 0"), "machine.cores");
    check(&good.replace("1.5000e-4", "-1"), "measured[0]");
    check(&good.replace("1.5000e-4", "1e300"), "measured[0]");
    check(
        &good.replace("spread: 0.020", "spread: .nan"),
        "measured[0]",
    );
    check(&good.replace("spread: 0.020", "spread: -1"), "measured[0]");
    check(
        &good.replace("schema_version: 1", "schema_version: 7"),
        "expected version 1",
    );
}

#[test]
fn peaks_are_of_their_type() {
    let mut of = profile();
    let rate = |profile: &Profile, dtype| profile.peak_of(dtype).0;
    // 64 × 128 × 256 products in 150 µs, on two ranks.
    let single = 2.0 * 2f64.powi(21) / 1.5e-4 * 2.0;
    assert!((rate(&of, DType::Bf16) / single - 1.0).abs() < 1e-9);
    for (element, seconds) in [("bf16", 1e-4), ("f8", 1e-5)] {
        of.measured.push(Measured {
            kernel: format!("matmul forward {element}"),
            seconds,
            ..of.measured[0].clone()
        });
    }
    assert!((rate(&of, DType::F32) / single - 1.0).abs() < 1e-9);
    assert!((rate(&of, DType::Bf16) / single - 1.5).abs() < 1e-9);
    assert!((of.peak().0 / single - 1.5).abs() < 1e-9);
}
