//! What every pass did, as a table and as JSON.

use crate::launch;
use crate::recipe::Session;
use crate::report::table;
use engine::Ranks;
use engine::passes::{Mode, Receipt, Switches, Target, all};
use serde_json::json;

/// What every pass did, over all programs: the start-up table. Those that found nothing to do are counted below it, or shown too (`whole`).
pub fn receipts_table(receipts: &[(&str, &[Receipt])], whole: bool) -> String {
    let (mut rows, mut off, mut idle) = (vec![], 0, 0);
    for pass in all() {
        let own: Vec<&Receipt> = receipts.iter().flat_map(|(_, r)| r.iter()).filter(|r| r.pass == pass.name()).collect();
        let applied: usize = own.iter().map(|r| r.applied).sum();
        let declined: usize = own.iter().map(|r| r.declined.len()).sum();
        let mode = own.first().map_or("off", |r| r.mode.name());
        let notes = together(&own).map_or(String::new(), |r| r.summary());
        let is_off = mode == "off";
        // One that is off for a reason says it.
        let silent = !is_off || notes.is_empty();
        if applied + declined == 0 && !whole && silent {
            *(if is_off { &mut off } else { &mut idle }) += 1;
            continue;
        }
        let count = |n: usize| if is_off { "-".to_string() } else { n.to_string() };
        rows.push(vec![pass.name().into(), mode.into(), count(applied + declined), count(applied), count(declined), notes]);
    }
    let mut text = table(&["pass", "mode", "sites", "applied", "declined", "notes"], &rows);
    if !whole && off + idle > 0 {
        text += &format!("{} more passes: {idle} have no site here, {off} are off (-v shows them)\n", off + idle);
    }
    text
}

/// The receipts of a pass in several programs as one.
fn together(own: &[&Receipt]) -> Option<Receipt> {
    let mut sum = (*own.first()?).clone();
    for other in &own[1..] {
        sum.applied += other.applied;
        sum.declined.extend(other.declined.iter().cloned());
        for note in &other.notes {
            if !sum.notes.contains(note) {
                sum.notes.push(note.clone());
            }
        }
    }
    Some(sum)
}

pub fn receipts_json(s: &Session) -> serde_json::Value {
    let one = |r: &Receipt| json!({ "pass": r.pass, "mode": r.mode.name(), "sites": r.sites(), "applied": r.applied, "declined": r.declined, "notes": r.notes });
    let all = s.programs.iter().map(|(name, p)| (name.clone(), p.receipts.iter().map(one).collect::<Vec<_>>()));
    serde_json::Value::Object(all.map(|(n, r)| (n, json!(r))).collect())
}

/// By how many ranks a run is trained and what connects them, for its files; nothing of a process alone.
pub fn ranks_json(ranks: &Ranks) -> Option<serde_json::Value> {
    let over = launch::connection();
    (ranks.size() > 1 || over.is_some()).then(|| json!({ "data": ranks.data.size, "tensor": ranks.tensor.size, "over": over }))
}

/// A warning, where ranks that have a model each do not divide the batch among them.
pub fn undivided(switches: &Switches, ranks: &Ranks, target: Target) -> Option<String> {
    const PASS: &str = "data-parallel";
    let pass = all().find(|p| p.name() == PASS)?;
    if ranks.data.size == 1 || switches.mode(pass, target) != Mode::Off {
        return None;
    }
    let why = match switches.chosen(PASS) {
        Some(_) => format!("--pass {PASS}=off"),
        None => format!("--optimize {}", switches.preset.name()),
    };
    Some(format!("warning: {PASS} is off ({why}), so every rank computes the whole batch; to divide it: --pass {PASS}=auto"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::passes::Mode;

    /// The first program has no such note, three others have the same.
    #[test]
    fn a_note_of_several_programs_is_said_once() {
        let one = |notes: &[&str]| Receipt {
            pass: "sparse-2:4",
            mode: Mode::Auto,
            applied: notes.len(),
            declined: vec![],
            notes: notes.iter().map(|n| n.to_string()).collect(),
            warm_up: None,
            added_flops: 0,
        };
        let all = [one(&[]), one(&["dense"]), one(&["dense", "other"]), one(&["dense"])];
        let named: Vec<(&str, &[Receipt])> = all.iter().map(|r| ("program", std::slice::from_ref(r))).collect();
        let said = receipts_table(&named, false);
        assert!(said.matches("dense").count() == 1 && said.contains("other"), "{said}");
    }
}
