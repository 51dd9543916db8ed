//! README's table against PyTorch says what bench/results.csv says.

use std::collections::HashMap;

fn read(name: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The fields of a line of CSV; quotes hold commas.
fn fields(line: &str) -> Vec<String> {
    let (mut all, mut quoted) = (vec![String::new()], false);
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => all.push(String::new()),
            c => all.last_mut().unwrap().push(c),
        }
    }
    all
}

/// `537,048 (1.32x)` is (537048, 1.32); without a ratio, 0.
fn cell(text: &str) -> (f64, f64) {
    let mut numbers = text.split(['(', ' ']).map(|t| t.trim_end_matches(['x', ')']).replace(',', "")).filter_map(|t| t.parse().ok());
    (numbers.next().unwrap_or_else(|| panic!("no number in '{text}'")), numbers.next().unwrap_or(0.0))
}

#[test]
fn readme_and_results_agree() {
    let results = read("bench/results.csv");
    let mut lines = results.lines();
    let header = fields(lines.next().unwrap());
    assert_eq!(header, ["date", "machine", "command", "what", "kiln", "peer", "ratio", "opponent"]);
    // The newest of a row and an opponent counts.
    let mut newest: HashMap<(String, String), Vec<String>> = HashMap::new();
    for (i, line) in lines.enumerate() {
        let f = fields(line);
        assert_eq!(f.len(), header.len(), "line {} of bench/results.csv: {line}", i + 2);
        if let Some((row, _)) = f[3].split_once(": ").filter(|_| !f[7].is_empty()) {
            let (kiln, peer, ratio): (f64, f64, f64) = (f[4].parse().unwrap(), f[5].parse().unwrap(), f[6].parse().unwrap());
            let own = if f[3].ends_with(", ms") { peer / kiln } else { kiln / peer };
            assert!((own - ratio).abs() <= 0.01 * ratio, "line {} of bench/results.csv: {kiln} and {peer} are not {ratio}", i + 2);
            newest.insert((row.to_string(), f[7].clone()), f);
        }
    }
    let readme = read("README.md");
    let table: Vec<Vec<&str>> = readme
        .lines()
        .skip_while(|l| !l.starts_with("| row |"))
        .skip(2)
        .take_while(|l| l.starts_with('|'))
        .map(|l| l.split('|').map(str::trim).collect())
        .collect();
    assert!(table.len() >= 11, "README's table against PyTorch has {} rows", table.len());
    for row in &table {
        for (opponent, text) in [("usual", row[4]), ("expert", row[5])] {
            let f = newest
                .get(&(row[1].to_string(), opponent.to_string()))
                .unwrap_or_else(|| panic!("{} ({opponent}) is not in results.csv", row[1]));
            let number = |i: usize| f[i].parse::<f64>().unwrap();
            assert_eq!((cell(row[3]).0, cell(text)), (number(4), (number(5), number(6))), "{} ({opponent})", row[1]);
            assert!(f[3].contains(row[2]), "{}: README has the conditions '{}', results.csv '{}'", row[1], row[2], f[3]);
        }
    }
}
