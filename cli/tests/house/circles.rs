//! No file of a crate imports, directly or through others, from one that imports from it. What a file only passes
//! on (`pub use`) counts as imported from where it is defined.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use regex::Regex;

use crate::{root, sources};

/// A module by the names on its path, without `crate`.
pub(crate) type Module = Vec<String>;

/// The files of a crate by module, without comments, strings and tests.
pub(crate) struct Crate {
    pub(crate) texts: BTreeMap<Module, String>,
    /// Names that a module passes on, with their full paths.
    passed_on: BTreeMap<Module, BTreeMap<String, Module>>,
}

impl Crate {
    pub(crate) fn read(folder: &Path) -> Self {
        let mut files = BTreeMap::new();
        sources(folder, &mut files);
        let noise = Regex::new(r#"//[^\n]*|"(?s:\\.|[^"\\])*""#).expect("a pattern");
        let texts = files.iter().filter_map(|(path, text)| {
            let inside = path.strip_prefix(folder).ok()?.with_extension("");
            let names = inside
                .iter()
                .map(|name| name.to_string_lossy().into_owned());
            let mut module: Module = names.collect();
            if ["mod", "lib", "main"].contains(&module.last()?.as_str()) {
                module.pop();
            }
            let code = text.split("#[cfg(test)]\nmod tests {").next()?;
            let is_test = module.iter().any(|name| name == "tests");
            (!is_test).then(|| (module, noise.replace_all(code, "").into_owned()))
        });
        let mut read = Self {
            texts: texts.collect(),
            passed_on: BTreeMap::new(),
        };
        let uses = Regex::new(r"pub(\([^)]*\))? use ([^;]+);").expect("a pattern");
        for (module, text) in &read.texts {
            let found = uses.captures_iter(text).flat_map(|c| paths(&c[2]));
            let found = found.filter_map(|path| {
                let full = read.absolute(&path, module)?;
                Some((path.last()?.clone(), full))
            });
            read.passed_on.insert(module.clone(), found.collect());
        }
        read
    }

    /// A path inside the crate, from its root.
    fn absolute(&self, path: &[String], module: &Module) -> Option<Module> {
        let first = path.first()?.as_str();
        match first {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([module, &path[1..]].concat()),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                let base = module.get(..module.len().checked_sub(ups)?)?;
                Some([base, &path[ups..]].concat())
            }
            _ => {
                let child = [module, &path[..1]].concat();
                let inside = self.texts.contains_key(&child);
                inside.then(|| [module, path].concat())
            }
        }
    }

    /// The module that defines what a path names.
    fn definer(&self, full: &[String], depth: usize) -> Option<Module> {
        let module = (0..=full.len())
            .rev()
            .map(|end| full[..end].to_vec())
            .find(|module| self.texts.contains_key(module))?;
        let rest = &full[module.len()..];
        let passed = rest
            .first()
            .and_then(|name| self.passed_on[&module].get(name));
        match passed {
            Some(target) if depth < 8 => {
                self.definer(&[&target[..], &rest[1..]].concat(), depth + 1)
            }
            _ => Some(module),
        }
    }

    /// The modules that a module imports from.
    pub(crate) fn imports(&self, module: &Module) -> BTreeSet<Module> {
        let text = &self.texts[module];
        let passing = Regex::new(r"pub(\([^)]*\))? use [^;]+;").expect("a pattern");
        let own = passing.replace_all(text, "");
        let uses = Regex::new(r"\buse ([^;]+);").expect("a pattern");
        let rest = uses.replace_all(&own, "");
        let inline = Regex::new(r"[A-Za-z_][A-Za-z_0-9]*(::[A-Za-z_][A-Za-z_0-9]*)+").expect("one");
        let used = uses.captures_iter(&own).flat_map(|c| paths(&c[1]));
        let named = inline.find_iter(&rest).flat_map(|m| paths(m.as_str()));
        let found = used.chain(named).filter_map(|path| {
            let full = self.absolute(&path, module)?;
            self.definer(&full, 0)
        });
        found.filter(|other| other != module).collect()
    }
}

/// Every path of a `use`, its braces written out.
fn paths(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some((before, inside)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or("").trim();
        let names = path.split("::").map(|name| name.trim().to_owned());
        let mut names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        if names.len() > 1 && names.last().is_some_and(|name| name == "self") {
            names.pop();
        }
        return vec![names];
    };
    let inside = inside.rsplit_once('}').map_or(inside, |(inside, _)| inside);
    let mut depth = 0;
    let items = inside.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    items
        .filter(|item| !item.trim().is_empty())
        .flat_map(|item| paths(&format!("{before}{}", item.trim())))
        .collect()
}

/// All that a module imports, directly or through others.
fn reached(imports: &BTreeMap<Module, BTreeSet<Module>>, from: &Module) -> BTreeSet<Module> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&Module> = vec![from];
    while let Some(module) = next.pop() {
        let new = imports.get(module).into_iter().flatten();
        next.extend(new.filter(|other| found.insert((*other).clone())));
    }
    found
}

/// Modules that import themselves through others, each with those of its imports that lead back to it.
fn in_circles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeMap<Module, Vec<Module>> {
    let back = |module: &Module, others: &BTreeSet<Module>| {
        let others = others
            .iter()
            .filter(|other| reached(imports, other).contains(module));
        others.cloned().collect::<Vec<_>>()
    };
    let all = imports
        .iter()
        .map(|(m, others)| (m.clone(), back(m, others)));
    all.filter(|(_, back)| !back.is_empty()).collect()
}

#[test]
fn files_of_a_crate_form_no_circle() {
    let mut circles = Vec::new();
    for folder in crate::crates() {
        let read = Crate::read(&root().join(&folder).join("src"));
        let imports = read.texts.keys().map(|m| (m.clone(), read.imports(m)));
        for (module, others) in in_circles(&imports.collect()) {
            let others: Vec<String> = others.iter().map(|other| other.join("::")).collect();
            circles.push(format!(
                "{folder}: {} imports {}",
                module.join("::"),
                others.join(", ")
            ));
        }
    }
    assert!(circles.is_empty(), "{}", circles.join("\n"));
}

#[test]
fn circles_are_found() {
    let imports = |pairs: &[(&str, &str)]| {
        let mut all: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
        for (from, to) in pairs {
            all.entry(vec![(*from).to_owned()])
                .or_default()
                .insert(vec![(*to).to_owned()]);
            all.entry(vec![(*to).to_owned()]).or_default();
        }
        in_circles(&all).len()
    };
    assert_eq!(imports(&[("a", "b"), ("b", "c"), ("a", "c")]), 0);
    assert_eq!(
        imports(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]),
        2
    );
    let written_out = paths("a::{b, c::{self, d}}");
    assert_eq!(
        written_out,
        [vec!["a", "b"], vec!["a", "c"], vec!["a", "c", "d"]]
    );
}
