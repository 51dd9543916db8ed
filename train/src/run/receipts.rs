//! What every pass did, as a table and as JSON.

use crate::recipe::Session;
use crate::report::table;
use engine::passes::{Receipt, all as switches};
use serde_json::json;

/// What every pass did, over all programs: the start-up table. Those that found nothing to do are counted below it, or shown too (`all`).
pub fn receipts_table(receipts: &[(&str, &[Receipt])], all: bool) -> String {
    let (mut rows, mut off, mut idle) = (vec![], 0, 0);
    for pass in switches() {
        let own: Vec<&Receipt> = receipts.iter().flat_map(|(_, r)| r.iter()).filter(|r| r.pass == pass.name()).collect();
        let applied: usize = own.iter().map(|r| r.applied).sum();
        let declined: usize = own.iter().map(|r| r.declined.len()).sum();
        let mode = own.first().map_or("off", |r| r.mode.name());
        let notes = together(&own).map_or(String::new(), |r| r.summary());
        let is_off = mode == "off";
        // One that is off for a reason says it.
        let silent = !is_off || notes.is_empty();
        if applied + declined == 0 && !all && silent {
            *(if is_off { &mut off } else { &mut idle }) += 1;
            continue;
        }
        let count = |n: usize| if is_off { "-".to_string() } else { n.to_string() };
        rows.push(vec![pass.name().into(), mode.into(), count(applied + declined), count(applied), count(declined), notes]);
    }
    let mut text = table(&["pass", "mode", "sites", "applied", "declined", "notes"], &rows);
    if !all && off + idle > 0 {
        text += &format!("{} more passes: {idle} have no site here, {off} are off (-v shows them)\n", off + idle);
    }
    text
}

/// The receipts of a pass in several programs as one.
fn together(own: &[&Receipt]) -> Option<Receipt> {
    let mut all = (*own.first()?).clone();
    for other in &own[1..] {
        all.applied += other.applied;
        all.declined.extend(other.declined.iter().cloned());
        for note in &other.notes {
            if !all.notes.contains(note) {
                all.notes.push(note.clone());
            }
        }
    }
    Some(all)
}

pub fn receipts_json(s: &Session) -> serde_json::Value {
    let one = |r: &Receipt| json!({ "pass": r.pass, "mode": r.mode.name(), "sites": r.sites(), "applied": r.applied, "declined": r.declined, "notes": r.notes });
    let all = s.programs.iter().map(|(name, p)| (name.clone(), p.receipts.iter().map(one).collect::<Vec<_>>()));
    serde_json::Value::Object(all.map(|(n, r)| (n, json!(r))).collect())
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
