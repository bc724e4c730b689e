//! The kernels that a file of CUDA C defines.

use cuda_device::kernels::Source;

/// Names of the kernels that a file defines, also by macros whose first parameter is the kernel's name or its end.
pub fn kernels(source: Source) -> Vec<String> {
    let text = source.text();
    let mut names = Vec::new();
    let mut within = None;
    for line in text.lines() {
        if let Some(definition) = line.strip_prefix("#define ") {
            within = definition
                .split_once('(')
                .filter(|(name, _)| !name.contains(' '));
        }
        if let Some(name) = defined(line) {
            match within {
                None => names.push(name.to_owned()),
                Some((of, parameters)) => {
                    let parameter = first(parameters);
                    let pasted = format!("##{parameter}");
                    let calls = text
                        .lines()
                        .filter_map(|line| line.strip_prefix(of)?.strip_prefix('('));
                    names.extend(calls.map(first).map(|given| match name == parameter {
                        true => given.to_owned(),
                        false => name.replace(&pasted, given),
                    }));
                }
            }
        }
        if !line.ends_with('\\') {
            within = None;
        }
    }
    assert!(!names.is_empty(), "{} defines no kernels", source.file());
    names
}

/// The name of the kernel whose definition begins in a line, as written there.
fn defined(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let signature = match line.strip_prefix("BOUNDED_KERNEL(") {
        Some(bounded) => bounded.split_once(") ")?.1,
        None => line.strip_prefix("KERNEL ")?,
    };
    Some(signature.split_once('(')?.0)
}

/// The first name in a list whose opening parenthesis was removed.
fn first(names: &str) -> &str {
    let end = names.find([',', ')']).unwrap_or(names.len());
    names[..end].trim()
}
