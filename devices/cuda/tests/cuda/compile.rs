//! Kernels compile for the architectures we know, where NVRTC is.

use cuda_device::kernels::{Head, SOURCES, Source};
use cuda_device::{Compiler, Name};

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
                for name in source.kernels() {
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
