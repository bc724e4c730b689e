//! `--keep`: decisions of a plan that a search leaves as they are.

use catalog::Mistake;
use costmodel::Scenario;
use planner::Constraints;
use plans::Strategy;

use crate::error::CliError;

/// Fixes decisions to what they are in a plan with these strategies, one for each of its groups of
/// replicas. Groups must agree in what is kept.
pub(crate) fn keep(
    kept: &[String],
    groups: &[&Strategy],
    constraints: &mut Constraints,
    scenario: &Scenario,
) -> Result<(), CliError> {
    for decision in kept {
        let mut values = Vec::with_capacity(groups.len());
        for group in groups {
            let mut own = Constraints::default();
            let decision = std::slice::from_ref(decision);
            planner::present::keep(decision, group, &mut own, scenario)?;
            values.extend(own.fix.into_values().map(|values| values.join("|")));
        }
        values.sort();
        values.dedup();
        if values.len() > 1 {
            let wrong = Mistake::new(format!(
                "`{decision}` differs between groups: {}",
                values.join(", ")
            ));
            let wrong = wrong.at(format!("--keep {decision}"));
            let wrong = wrong.expected("a decision in which all groups of the plan agree");
            let example = format!("--fix '{decision}={}'", values.join("|"));
            return Err(wrong.example(example).into());
        }
    }
    Ok(planner::present::keep(
        kept,
        groups[0],
        constraints,
        scenario,
    )?)
}
