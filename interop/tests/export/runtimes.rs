//! Plans for every runtime: a file that is exported passes its own check, whatever kernels and types the runtime has.

use catalog::Precision;
use interop::check::{Severity, check};
use interop::export::Dialect;

use super::{exported_for, read, scene};

#[test]
fn files_of_every_runtimes_plans_pass_their_check() {
    let mut taken = 0;
    for preset in catalog::runtime_presets::presets() {
        let runtime = preset.runtime;
        for (name, gpus, text) in [
            ("llama3-8b", 8, "zero=0,recompute=full"),
            ("llama3-8b", 64, "zero=1,recompute=full"),
            ("llama3-8b", 64, "zero=3,recompute=full"),
            ("llama3-8b", 64, "tp=4,pp=4,zero=1,recompute=full"),
            ("gpt2-124m", 8, "zero=0"),
        ] {
            for precision in [Precision::Bf16, Precision::Fp16] {
                let (model, workload) = scene(name, gpus, precision);
                let strategy = plans::grammar::parse(text, &model, &workload, &runtime);
                let Ok(strategy) = strategy else { continue };
                for dialect in Dialect::ALL {
                    let of = &runtime.name;
                    let exported = exported_for(of, &strategy, &model, &workload, dialect, None);
                    let Ok(exported) = exported else { continue };
                    taken += 1;
                    let file = &exported.files[0];
                    let document = read(&file.text, &file.name, Some(dialect));
                    let found = check(&document, Some(&model)).expect("schema");
                    let mut wrong = found.iter().filter(|f| f.severity == Severity::Error);
                    let wrong = wrong.next();
                    assert!(wrong.is_none(), "{of} {text} {}: {wrong:?}", dialect.name());
                }
            }
        }
    }
    assert!(taken > 500, "{taken} files");
}
