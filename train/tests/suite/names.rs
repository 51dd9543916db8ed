//! Recipes are known by trait: nothing outside their own folders names one.

use kiln::recipes::RECIPES;
use std::fs;
use std::path::{Path, PathBuf};

/// All .rs files below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        match path.is_dir() {
            true => sources(&path, found),
            false => found.extend(path.extension().is_some_and(|e| e == "rs").then_some(path)),
        }
    }
}

/// Recipes whose name is also a word of the field: modules, parameters and messages may use it. What counts is who names the recipe.
const WORDS: &[(&str, [&str; 3])] = &[("decoder", ["recipes::decoder", "DecoderRecipe", "train decoder"])];

/// The lines of a source that name a recipe.
fn naming_recipe(source: &str, name: &str) -> Vec<String> {
    match WORDS.iter().find(|w| w.0 == name) {
        Some((_, ways)) => ways.iter().flat_map(|way| naming(source, way)).collect(),
        None => naming(source, name),
    }
}

/// The lines of a source that hold a name as a word, outside of comments that no help is made from and of tests.
fn naming(source: &str, name: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]").next().unwrap();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let names = |line: &str| {
        let mut from = 0;
        while let Some(at) = line[from..].find(name).map(|at| at + from) {
            let end = at + name.len();
            if !line[..at].ends_with(is_word) && !line[end..].starts_with(is_word) {
                return true;
            }
            from = end;
        }
        false
    };
    let is_note = |line: &str| line.starts_with("//!") || line.starts_with("//") && !line.starts_with("///");
    code.lines().map(str::trim).filter(|l| !is_note(l) && names(l)).map(String::from).collect()
}

#[test]
fn only_the_table_and_the_folders_of_recipes_name_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = vec![];
    sources(&root, &mut all);
    let outside: Vec<&PathBuf> = all.iter().filter(|p| !p.starts_with(root.join("recipes"))).collect();
    assert!(outside.len() > 60 && outside.len() < all.len(), "{} of {}", outside.len(), all.len());
    let mut found = vec![];
    for path in outside {
        let source = fs::read_to_string(path).unwrap();
        for recipe in RECIPES {
            found.extend(naming_recipe(&source, recipe.name()).into_iter().map(|line| format!("{}: {line}", path.display())));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// One recipe does not name another either, and the table has a line for each folder.
#[test]
fn a_recipe_names_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/recipes");
    let mut folders = 0;
    for folder in fs::read_dir(&root).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        folders += 1;
        let own = folder.file_name().unwrap().to_str().unwrap();
        let mut all = vec![];
        sources(&folder, &mut all);
        for path in all {
            let source = fs::read_to_string(&path).unwrap();
            for other in RECIPES.iter().filter(|r| r.name() != own) {
                assert_eq!(naming_recipe(&source, other.name()), Vec::<String>::new(), "{}", path.display());
            }
        }
    }
    assert_eq!(folders, RECIPES.len());
}

#[test]
fn the_search_finds_names() {
    let source = "use crate::recipes::hydra::X;\nlet a = \"hydra\";\nlet hydrant = 1;\n/// kiln train hydra\n// hydra in a note\n#[cfg(test)]\nhydra";
    assert_eq!(naming(source, "hydra"), ["use crate::recipes::hydra::X;", "let a = \"hydra\";", "/// kiln train hydra"]);
}
