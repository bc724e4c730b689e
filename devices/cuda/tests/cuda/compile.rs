//! Kernels compile for the architectures we know, where NVRTC is.

use cuda_device::kernels::{Head, Source};
use cuda_device::{CACHE, Compiler, Name};

use crate::emulator::sources::kernels;

/// Every file.
const SOURCES: [Source; 10] = [
    Source::Elementwise,
    Source::Norm,
    Source::Scale,
    Source::Reduce,
    Source::EightBits,
    Source::Token,
    Source::Expert,
    Source::Grouped,
    Source::AttentionSmall,
    Source::Attention,
];

#[test]
fn kernels_compile_for_every_architecture() {
    let folder = std::env::temp_dir().join(format!("vescale-cubins-{}", std::process::id()));
    let compiler = match Compiler::with_cache(Some(folder.clone())) {
        Ok(compiler) => compiler,
        Err(error) => {
            eprintln!("not tested: {error}");
            assert!(Name::Nvrtc.open().is_err());
            return;
        }
    };
    for capability in [[8, 0], [9, 0], [10, 0]] {
        for source in SOURCES {
            // The last is that of DeepSeek's latent attention.
            let heads: &[[u32; 2]] = match source {
                Source::Attention => &[[64, 64], [128, 128], [192, 128]],
                _ => &[[0, 0]],
            };
            for &[key, value] in heads {
                let head = Head { key, value };
                let cubin = compiler
                    .cubin(source, head, capability)
                    .expect("kernels compile");
                // Every kernel's name stands in the object's table of symbols.
                for name in kernels(source) {
                    let found = cubin
                        .windows(name.len())
                        .any(|part| part == name.as_bytes());
                    assert!(found, "{name} is not in {}", source.file());
                }
                let again = compiler.cubin(source, head, capability).expect("was kept");
                assert!(again == cubin);
            }
        }
    }
    let kept = std::fs::read_dir(&folder).expect("the cache").count();
    assert_eq!(kept, 3 * (SOURCES.len() + 2));
    std::fs::remove_dir_all(&folder).expect("made above");
}

/// Dimensions of heads in the tests of kernels, and of the models that `tests/gpu/run` trains.
const TRIED_HEADS: [[u32; 2]; 8] = [
    [16, 16],
    [16, 32],
    [16, 48],
    [32, 16],
    [32, 48],
    [64, 64],
    [128, 128],
    [192, 128],
];

/// Compiles for a GPU on another machine (`tests/gpu/build`); without a named cache nothing is
/// kept.
#[test]
fn kernels_of_hopper_are_kept() {
    if std::env::var_os(CACHE).is_none() {
        return;
    }
    let compiler = match Compiler::new() {
        Ok(compiler) => compiler,
        Err(error) => return println!("kernels are compiled where the GPU is: {error}"),
    };
    for source in SOURCES {
        let heads: &[[u32; 2]] = match source {
            Source::Attention => &TRIED_HEADS,
            _ => &[[0, 0]],
        };
        for &[key, value] in heads {
            let kept = compiler.cubin(source, Head { key, value }, [9, 0]);
            kept.expect("kernels compile");
        }
    }
}
