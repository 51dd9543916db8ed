//! Commands that the pages and the help show parse, and name presets, keys and passes that are there.

use super::*;
use crate::recipes::RECIPES;
use clap::error::ErrorKind;

/// A line of a shell as its words: quotes are taken off, a comment ends it.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (vec![], None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ') => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.into_iter().chain(word).collect()
}

/// Commands in fenced blocks, each up to what a shell would do with its output or after it.
fn fenced(text: &str) -> Vec<&str> {
    let lines = text.split("```").skip(1).step_by(2).flat_map(str::lines).flat_map(|l| l.split(" && "));
    lines.filter(|l| l.starts_with("kiln ")).map(|l| l.split(" > ").next().unwrap_or(l)).collect()
}

/// `kiln ..` inside a sentence, which may leave out what the sentence says.
fn inline(text: &str) -> Vec<String> {
    let outside: Vec<&str> = text.split("```").step_by(2).collect();
    let spans = outside.iter().flat_map(|part| part.split('`').skip(1).step_by(2)).flat_map(|span| span.split("&&"));
    let plain = |span: &str| span.split_whitespace().take_while(|w| *w != ">").filter(|w| *w != "..").collect::<Vec<_>>().join(" ");
    spans.map(plain).filter(|span| span.starts_with("kiln ")).collect()
}

fn parsed(line: &str) -> Result<Kiln, clap::Error> {
    Kiln::try_parse_from(words(line))
}

/// Presets, keys and passes that a command names are there, too.
fn resolves(command: Command) -> Result<(), String> {
    let config = match command {
        Command::Train(a) if !a.goes_on() => a.config,
        _ => return Ok(()),
    };
    config.resolve(RECIPES, None).map(|_| ()).map_err(|e| format!("{e:#}"))
}

/// README.md and docs/*.md.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|e| e.unwrap().path());
    let paths = docs.filter(|p| p.extension().is_some_and(|e| e == "md")).chain([root.join("README.md")]);
    paths.map(|p| (p.clone(), std::fs::read_to_string(p).unwrap())).collect()
}

/// Those in fenced blocks that no test runs, too. A command inside a sentence may leave out an argument or a value.
#[test]
fn every_command_of_the_pages_parses() {
    let (mut whole, mut parts) = (0, 0);
    for (path, page) in pages() {
        let at = |line: &str, problem: String| format!("{}: {line}\n{problem}", path.display());
        for line in fenced(&page) {
            whole += 1;
            let command = parsed(line).unwrap_or_else(|e| panic!("{}", at(line, e.to_string()))).command;
            resolves(command).unwrap_or_else(|e| panic!("{}", at(line, e)));
        }
        for span in inline(&page) {
            parts += 1;
            match parsed(&span) {
                Ok(kiln) => resolves(kiln.command).unwrap_or_else(|e| panic!("{}", at(&span, e))),
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::MissingRequiredArgument
                            | ErrorKind::InvalidValue
                            | ErrorKind::MissingSubcommand
                            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                    ) => {}
                Err(e) => panic!("{}", at(&span, e.to_string())),
            }
        }
    }
    assert!(whole > 50 && parts > 30, "{whole} {parts}");
    assert_eq!(
        words("kiln generate runs/a --prompt 'the ' --stop '\\n'   # let it write"),
        ["kiln", "generate", "runs/a", "--prompt", "the ", "--stop", "\\n"]
    );
    assert!(parsed("kiln train --preseet small").is_err());
    assert!(resolves(parsed("kiln train --set model.dmi=3").unwrap().command).is_err());
}

#[test]
fn every_example_of_the_help_parses() {
    fn each(command: &clap::Command, program: &str, visit: &mut dyn FnMut(&str)) {
        let text = command.get_after_help().map(|t| t.to_string()).unwrap_or_default();
        // The words of an example end where an explanation is set apart.
        text.lines()
            .filter_map(|l| l.strip_prefix(&format!("  {program} ")))
            .for_each(|l| visit(&format!("kiln {}", l.split("  ").next().unwrap_or(l))));
        command.get_subcommands().for_each(|c| each(c, program, visit));
    }
    let mut seen = 0;
    let whole = command(RECIPES);
    let program = crate::program();
    each(&whole, &program, &mut |line| {
        seen += 1;
        let command = parsed(line).unwrap_or_else(|e| panic!("{line}\n{e}")).command;
        resolves(command).unwrap_or_else(|e| panic!("{line}: {e}"));
    });
    assert!(seen > 30, "{seen}");
}
