//! A read-only command line over the pages: `ls`, `tree`, `cat`, `head` and `rg`, with the quoting rules of a shell and
//! none of its powers.
//!
//! Nothing is executed and nothing of the host is read: the file system is the embedded pages. The output is bounded, and
//! so is the time of a search, by the size of the compiled pattern and by a deadline that the caller keeps. The pattern
//! language and the output of `rg` are those of ripgrep, by its own libraries.

mod arguments;
mod error;
mod files;
mod output;
mod rg;
mod shell;

use std::fmt::Write as _;

pub use self::error::CommandError;
use self::error::shown;
use self::files::{Entry, Files};
pub use self::output::OUTPUT_MAX_BYTES;
use self::output::cut;
use crate::catalogue::{Catalogue, catalogue};

/// Maximum length of a command, in bytes.
pub const COMMAND_MAX_BYTES: usize = 4096;
/// Lines that `head` prints without `-n`.
const HEAD_LINES: usize = 10;

/// What the commands are, for error messages and descriptions.
pub const USAGE: &str = "ls [path] | tree [path] [-L depth] | cat <file...> | head [-n N | -N] <file...> | \
                         rg [-C N] <pattern> [path]";

/// Runs a command over the pages. `is_late` says that the time for it is over; it is asked often.
///
/// # Errors
/// When the command is not one of those that exist, or names a file that does not. The message says what to do.
pub fn run(command: &str, is_late: &dyn Fn() -> bool) -> Result<String, CommandError> {
    run_on(catalogue(), command, is_late)
}

fn run_on(catalogue: &Catalogue, command: &str, is_late: &dyn Fn() -> bool) -> Result<String, CommandError> {
    if command.len() > COMMAND_MAX_BYTES {
        return Err(CommandError::new(format!(
            "the command is longer than {COMMAND_MAX_BYTES} bytes"
        )));
    }
    let words = shell::split(command).map_err(|error| CommandError::new(error.to_string()))?;
    let Some((name, arguments)) = words.split_first() else {
        return Err(CommandError::new(format!("the command is empty; usage: {USAGE}")));
    };
    let files = Files::of(catalogue);
    let output = match name.as_str() {
        "ls" => list(&files, arguments)?,
        "tree" => tree(&files, arguments)?,
        "cat" => print(&files, "cat", arguments, None)?,
        "head" => head(&files, arguments)?,
        "rg" => rg::run(&files, arguments, is_late)?,
        _ => {
            return Err(CommandError::new(format!(
                "{}: no such command; usage: {USAGE}",
                shown(name)
            )));
        }
    };
    Ok(cut(output))
}

fn list(files: &Files, arguments: &[String]) -> Result<String, CommandError> {
    let mut paths = Vec::new();
    for argument in arguments {
        match argument.strip_prefix('-') {
            // What it shows is the same with these, and habit adds them.
            Some(flags) if !flags.is_empty() && flags.chars().all(|flag| "1ahlF".contains(flag)) => {}
            Some(flags) if !flags.is_empty() => {
                return Err(CommandError::new(format!(
                    "ls: unknown option {}; usage: ls [path] (tree shows everything below a directory)",
                    shown(argument)
                )));
            }
            _ => paths.push(argument.as_str()),
        }
    }
    let path = match paths.as_slice() {
        [] => "/",
        [path] => path,
        _ => return Err(CommandError::new("ls: more than one path; usage: ls [path]")),
    };
    let mut output = String::new();
    match files.find("ls", path)? {
        Entry::File(page) => output = format!("{}\n", page.file),
        Entry::Directory(directory) => {
            for (name, is_directory) in files.children(&directory) {
                let _ = writeln!(output, "{name}{}", if is_directory { "/" } else { "" });
            }
        }
    }
    Ok(output)
}

fn tree(files: &Files, arguments: &[String]) -> Result<String, CommandError> {
    const USAGE: &str = "usage: tree [path] [-L depth]";
    let mut arguments = arguments::Arguments::new("tree", arguments, USAGE);
    let (mut paths, mut depth) = (Vec::new(), usize::MAX);
    while let Some(argument) = arguments.next() {
        match argument {
            arguments::Argument::Positional(path) => paths.push(path),
            arguments::Argument::Short('L') => depth = arguments.number("-L", 1)?,
            other => return Err(arguments.unknown(&other)),
        }
    }
    let path = match paths.as_slice() {
        [] => "/",
        [path] => path,
        _ => return Err(CommandError::new(format!("tree: more than one path; {USAGE}"))),
    };
    let Entry::Directory(directory) = files.find("tree", path)? else {
        return Err(CommandError::new(format!(
            "tree: {}: not a directory; use cat",
            shown(path)
        )));
    };
    let mut output = format!("{directory}\n");
    let mut counts = (0, 0);
    branch(files, &directory, "", depth, &mut output, &mut counts);
    let plural = |count: i32, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    let _ = writeln!(
        output,
        "\n{}, {}",
        plural(counts.0, "directory", "directories"),
        plural(counts.1, "file", "files")
    );
    Ok(output)
}

fn branch(files: &Files, directory: &str, indent: &str, depth: usize, output: &mut String, counts: &mut (i32, i32)) {
    if depth == 0 {
        return;
    }
    let children = files.children(directory);
    for (at, (name, is_directory)) in children.iter().enumerate() {
        let is_last = at + 1 == children.len();
        let _ = writeln!(output, "{indent}{} {name}", if is_last { "└──" } else { "├──" });
        if *is_directory {
            counts.0 += 1;
            let indent = format!("{indent}{}", if is_last { "    " } else { "│   " });
            let below = format!("{}/{name}", directory.trim_end_matches('/'));
            branch(files, &below, &indent, depth - 1, output, counts);
        } else {
            counts.1 += 1;
        }
    }
}

fn head(files: &Files, arguments: &[String]) -> Result<String, CommandError> {
    const USAGE: &str = "usage: head [-n N | -N] <file...>";
    let mut parsed = arguments::Arguments::new("head", arguments, USAGE);
    let (mut paths, mut lines) = (Vec::new(), HEAD_LINES);
    while let Some(argument) = parsed.next() {
        match argument {
            arguments::Argument::Positional(path) => paths.push(path),
            arguments::Argument::Short('n') => lines = parsed.number("-n", 0)?,
            arguments::Argument::Long("lines") => lines = parsed.number("--lines", 0)?,
            arguments::Argument::Short(digit) if digit.is_ascii_digit() => lines = parsed.digits(digit)?,
            other => return Err(parsed.unknown(&other)),
        }
    }
    print(files, "head", &paths, Some(lines))
}

/// Files one after the other, whole or only their first lines.
fn print(files: &Files, command: &str, paths: &[String], lines: Option<usize>) -> Result<String, CommandError> {
    if paths.is_empty() {
        return Err(CommandError::new(format!("{command}: no file named; tree lists them")));
    }
    let mut output = String::new();
    for path in paths {
        if lines.is_none() && path.len() > 1 && path.starts_with('-') {
            return Err(CommandError::new(format!(
                "cat: unknown option {}; usage: cat <file...>",
                shown(path)
            )));
        }
        let page = match files.find(command, path)? {
            Entry::File(page) => page,
            Entry::Directory(_) => {
                return Err(CommandError::new(format!(
                    "{command}: {}: is a directory; ls lists it",
                    shown(path)
                )));
            }
        };
        // What is cut in the end is not collected either.
        if output.len() > OUTPUT_MAX_BYTES {
            continue;
        }
        if lines.is_some() && paths.len() > 1 {
            let separator = if output.is_empty() { "" } else { "\n" };
            let _ = writeln!(output, "{separator}==> {} <==", page.file);
        }
        for line in page.body.split_inclusive('\n').take(lines.unwrap_or(usize::MAX)) {
            output.push_str(line);
        }
    }
    Ok(output)
}

#[cfg(test)]
mod tests;
