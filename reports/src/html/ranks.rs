//! Ranks on nodes: which axis stays inside a node, which crosses the network, and each GPU's place.

use catalog::{Axis, Domain};
use maud::{Markup, html};
use plans::{Decisions, Group};

use super::page::{heads, section as frame};
use crate::format;
use crate::input::ReportInput;

/// Largest number of nodes that is drawn; if there are more, the first ones and the last are.
const NODES: u64 = 4;
/// Largest number of GPUs that is drawn for a node.
const GPUS: u64 = 16;

/// Axes, each with its name in words and the short word before a rank's place on it.
const AXES: [(Axis, &str, &str); 5] = [
    (Axis::Tp, "tensor parallel", "tp"),
    (Axis::Cp, "context parallel", "cp"),
    (Axis::DpShard, "data parallel, states shared", "shard"),
    (Axis::DpReplicate, "data parallel, replicas", "replica"),
    (Axis::Pp, "pipeline stages", "stage"),
];

/// Axes of the experts' own layout, each with its name in words.
const EXPERTS: [(Axis, &str); 2] = [
    (Axis::Etp, "tensor parallel inside experts"),
    (Axis::Ep, "expert parallel"),
];

/// Table of the axes and a drawing of some nodes; empty for a single GPU.
pub(super) fn section(input: &ReportInput) -> Markup {
    if input.gpus < 2 {
        return html! {};
    }
    let body = html! {
        (axes(input))
        (nodes(input))
    };
    let lead = match domain_of_nodes(input) {
        Some(gpus) => format!(
            "Neighbouring ranks are neighbouring GPUs. Fast links join the nodes of a domain, and the job uses {gpus} GPUs of \
             each; what leaves a domain uses the network."
        ),
        None => "Neighbouring ranks are neighbouring GPUs. What stays in a node uses its fast links; what crosses nodes \
                 uses the network."
            .to_owned(),
    };
    frame("ranks", "Ranks on nodes", &lead, &body)
}

fn axes(input: &ReportInput) -> Markup {
    let d = input.decisions;
    let layout = AXES.map(|(axis, name, _)| (axis, name));
    let used = layout.into_iter().chain(EXPERTS);
    let used = used.filter(|(axis, _)| d.group(*axis).size > 1);
    html! {
        div.scroll tabindex="0" role="region" aria-label="Axes and the links they use" {
            table.plain {
                (heads(&["Axis", "#GPUs", "#Apart", "Goes over"]))
                tbody {
                    @for (axis, name) in used {
                        @let group = d.group(axis);
                        tr {
                            td { (name) }
                            td.num { (format::count(group.size)) }
                            td.num { (format::count(group.stride)) }
                            td { (links(group, input)) }
                        }
                    }
                }
            }
        }
    }
}

/// GPUs of a domain, if its fast links join several nodes.
fn domain_of_nodes(input: &ReportInput) -> Option<u64> {
    let gpus = input.domain.gpus.min(input.gpus);
    (gpus > input.gpus_per_node).then_some(gpus)
}

/// The links that a group of ranks uses, in words.
fn links(group: Group, input: &ReportInput) -> String {
    let node = Domain {
        gpus: input.gpus_per_node.max(1),
        is_whole_job: input.gpus <= input.gpus_per_node,
    };
    let in_node = group.ranks_per_domain(node);
    if in_node == group.size {
        return "links inside a node".to_owned();
    }
    let most = |domain| group.most_domains(domain, input.gpus);
    let nodes = format::count(most(node));
    let (of_places, place) = match domain_of_nodes(input) {
        Some(_) => (input.domain, "domain"),
        None => (node, "node"),
    };
    let near = group.ranks_per_domain(of_places);
    if near == group.size {
        return format!("fast links among {nodes} nodes of a domain");
    }
    let places = most(of_places);
    let network = format!("{} {place}s", format::count(places));
    if places == group.size {
        return format!("the network: every rank is in a {place} of its own ({network})");
    }
    let size = format::count(group.size);
    let least = match (near, near * places == group.size) {
        (_, true) => "",
        (1, false) => {
            return format!(
                "the network among {network}; some of the {size} ranks share a {place}"
            );
        }
        (_, false) => "at least ",
    };
    format!("links inside a {place} for {least}{near} of {size}, then the network among {network}")
}

/// A rank's place on an axis, from 0.
fn place(d: &Decisions, axis: Axis, rank: u64) -> u64 {
    let group = d.group(axis);
    rank / group.stride % group.size
}

fn nodes(input: &ReportInput) -> Markup {
    let per_node = input.gpus_per_node.min(input.gpus).max(1);
    let count = input.gpus.div_ceil(per_node);
    let shown: Vec<u64> = match count > NODES {
        true => (0..NODES - 1).chain([count - 1]).collect(),
        false => (0..count).collect(),
    };
    let columns = per_node.min(GPUS);
    let d = input.decisions;
    html! {
        p.note {
            "GPUs of " (if count > NODES { "the first nodes and the last" } else { "every node" })
            ", with each rank's place on the axes that differ inside it"
        }
        div.scroll tabindex="0" role="region" aria-label="What each GPU of a node is" {
            table.nodes {
                thead { tr {
                    th scope="col" { "Node" }
                    @for gpu in 0..columns { th scope="col" { "GPU " (gpu) } }
                } }
                tbody {
                    @for node in shown {
                        @let first = node * per_node;
                        @let different = |axis| varies(d, axis, first, per_node);
                        @let same = |axis| d.group(axis).size > 1 && !different(axis);
                        tr {
                            th scope="row" { b { (format::count(node)) } small { (places(d, first, same)) } }
                            @for rank in first..first + columns {
                                td style=(format!("--stage:{}", place(d, Axis::Pp, rank) % 8)) {
                                    (places(d, rank, different))
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A rank's places on some of the axes.
fn places(d: &Decisions, rank: u64, shown: impl Fn(Axis) -> bool) -> String {
    let parts = AXES.into_iter().filter(|(axis, ..)| shown(*axis));
    let parts = parts.map(|(axis, _, letters)| format!("{letters} {}", place(d, axis, rank)));
    parts.collect::<Vec<_>>().join(", ")
}

fn varies(d: &Decisions, axis: Axis, first: u64, per_node: u64) -> bool {
    (first..first + per_node).any(|rank| place(d, axis, rank) != place(d, axis, first))
}
