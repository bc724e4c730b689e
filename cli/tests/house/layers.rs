//! Files and folders of the cost model import only from those that ARCHITECTURE.md's table names before them.

use std::collections::BTreeSet;
use std::fs;

use regex::Regex;

use crate::circles::Crate;
use crate::root;

/// Names in the first column of the table of `costmodel/src`, from its top.
fn order() -> Vec<String> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("a document");
    let (_, table) = text.split_once("| `costmodel/src` |").expect("the table");
    let rows = table.lines().skip(2).take_while(|row| row.starts_with('|'));
    let name = Regex::new("`([a-z_]+)`").expect("a pattern");
    let first = rows.filter_map(|row| row.split('|').nth(1));
    first
        .flat_map(|names| name.captures_iter(names))
        .map(|found| found[1].to_owned())
        .collect()
}

#[test]
fn cost_model_imports_only_what_stands_above() {
    let order = order();
    let read = Crate::read(&root().join("costmodel/src"));
    let files = read.texts.keys().filter_map(|module| module.first());
    let files: BTreeSet<&String> = files.collect();
    assert_eq!(order.iter().collect::<BTreeSet<_>>(), files);
    assert_eq!(order.len(), files.len(), "a file is named twice");

    let place = |name: &String| order.iter().position(|other| other == name);
    let mut upward = Vec::new();
    for module in read.texts.keys().filter(|module| !module.is_empty()) {
        let others = read.imports(module);
        let others = others.iter().filter_map(|other| other.first());
        let above = others.filter(|other| place(other) > place(&module[0]));
        upward.extend(above.map(|other| format!("{} imports {other}", module.join("::"))));
    }
    assert!(upward.is_empty(), "{}", upward.join("\n"));
}
