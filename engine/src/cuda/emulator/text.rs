//! Translates CUDA source to C++: inline PTX becomes function calls and dynamic shared memory a pointer; cuda.h defines the rest.

use crate::kernel::Launch;
use std::collections::BTreeSet;

/// A kernel's source in a namespace of its own, with a function that calls each entry, so that one file can have several.
pub fn translated(text: &str, entries: &BTreeSet<(&'static str, usize)>, name: &str) -> String {
    let text = pointers(&calls(text)).replace("extern \"C\" __global__", "__global__");
    let mut out = format!("namespace {name} {{\n{text}\n");
    for (entry, args) in entries {
        let args: Vec<String> = (0..*args).map(|i| format!("emu_argument{{args[{i}]}}")).collect();
        let function = symbol(name, entry);
        out += &format!(
            "extern \"C\" __attribute__((visibility(\"default\"))) void {function}(void **args) {{ {entry}({}); }}\n",
            args.join(", ")
        );
    }
    out += "}\n";
    let defined: BTreeSet<&str> = text.lines().filter_map(|l| l.trim_start().strip_prefix("#define ")).map(word).collect();
    defined.iter().for_each(|name| out += &format!("#undef {name}\n"));
    out
}

pub fn symbol(name: &str, entry: &str) -> String {
    format!("run_{name}_{entry}")
}

/// The name of a launch's source: equal sources are compiled once.
pub fn name(launch: &Launch) -> String {
    format!("k{:016x}", xxhash_rust::xxh3::xxh3_64(launch.text().as_bytes()))
}

fn word(text: &str) -> &str {
    &text[..text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len())]
}

/// `extern __shared__ __align__(16) float name[];` as a pointer.
fn pointers(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("extern __shared__ ") {
        let (declared, behind) = after.split_once(';').expect("a declaration ends");
        let declared = declared.strip_prefix("__align__(").map_or(declared, |d| d.split_once(')').expect("an alignment ends").1);
        let (kind, name) = declared.trim().trim_end_matches("[]").rsplit_once(' ').expect("a type and a name");
        out += &format!("{before}{kind} *{name} = ({kind} *)emu_now->dynamic;");
        rest = behind;
    }
    out + rest
}

/// `asm volatile("name.of.it %0, [%1];" : "=r"(a) : "r"(b) : "memory")` as `ptx_name_of_it(a, b)`.
fn calls(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("asm") {
        let alone = !rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let after = rest[at + 3..].trim_start();
        let after = after.strip_prefix("volatile").unwrap_or(after).trim_start();
        match after.strip_prefix('(').filter(|_| alone).and_then(closing) {
            Some((inside, behind)) => {
                out += &rest[..at];
                out += &call(inside);
                rest = behind;
            }
            None => {
                out += &rest[..at + 3];
                rest = &rest[at + 3..];
            }
        }
    }
    out + rest
}

/// Splits at the closing bracket.
fn closing(text: &str) -> Option<(&str, &str)> {
    let (mut depth, mut quoted) = (1, false);
    for (i, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((&text[..i], &text[i + 1..]));
        }
    }
    None
}

/// Splits at separators outside of brackets and strings.
fn split(text: &str, separator: char) -> Vec<&str> {
    let (mut depth, mut quoted, mut from, mut parts) = (0, false, 0, vec![]);
    for (i, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' | '[' | '{' if !quoted => depth += 1,
            ')' | ']' | '}' if !quoted => depth -= 1,
            c if c == separator && depth == 0 && !quoted => {
                parts.push(text[from..i].trim());
                from = i + 1;
            }
            _ => {}
        }
    }
    parts.push(text[from..].trim());
    parts
}

fn call(inside: &str) -> String {
    let sections = split(inside, ':');
    let template: String = sections[0].split('"').skip(1).step_by(2).collect();
    let operands: Vec<&str> = sections.iter().skip(1).take(2).flat_map(|s| split(s, ',')).filter(|o| !o.is_empty()).collect();
    // "=r"(expression)
    let operands: Vec<&str> = operands.iter().map(|o| o.trim_start_matches(|c| c != '(')).collect();
    let template = template.trim().trim_end_matches(';');
    if template.is_empty() {
        return "((void)0)".into();
    }
    let (name, given) = template.split_once(' ').unwrap_or((template, ""));
    let name: String = name.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
    let given = given.replace(['[', ']', '{', '}'], "");
    let given = given.split(',').map(str::trim).filter(|g| !g.is_empty());
    let given: Vec<&str> = given
        .map(|g| g.strip_prefix('%').and_then(|n| n.parse().ok()).and_then(|n: usize| operands.get(n).copied()).unwrap_or(g))
        .collect();
    format!("ptx_{name}({})", given.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assembly_becomes_calls_with_operands_in_the_order_of_the_text() {
        let one = "float r; asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(r) : \"h\"(v.bits)); return r;";
        assert_eq!(calls(one), "float r; ptx_cvt_f32_f16((r), (v.bits)); return r;");
        let copy = "asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16, %2;\" ::\"r\"(at(to)), \"l\"(from), \"r\"(live ? 16 : 0) : \"memory\");";
        assert_eq!(calls(copy), "ptx_cp_async_cg_shared_global((at(to)), (from), 16, (live ? 16 : 0));");
        assert_eq!(calls("asm volatile(\"\" : \"+r\"(x)); int plasma(int asm_);"), "((void)0); int plasma(int asm_);");
        assert_eq!(
            calls("asm(\"mma {%0, %1}, {%2}, {%0};\" : \"+f\"(c[0]), \"+f\"(c[1]) : \"r\"(a))"),
            "ptx_mma((c[0]), (c[1]), (a), (c[0]))"
        );
    }

    #[test]
    fn dynamic_shared_memory_is_a_pointer() {
        assert_eq!(pointers("extern __shared__ __align__(16) float a[]; x"), "float *a = (float *)emu_now->dynamic; x");
        assert_eq!(pointers("extern __shared__ uint4 b[];"), "uint4 *b = (uint4 *)emu_now->dynamic;");
    }
}
