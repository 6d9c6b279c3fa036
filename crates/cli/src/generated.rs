//! Completions of shells and manual pages, made from the definition of the command line, so that neither can be out of date.
//!
//! Invariant: no configuration is read. A shell asks for completions when it starts, whatever state the platform is in.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Cli;
use crate::output;

/// Name of the program in the shell.
const PROGRAM: &str = "ringfence";

/// Writes the completions for a shell to stdout.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn completions(shell: Shell) -> Result<()> {
    output::text(&completions_of(shell))
}

fn completions_of(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), PROGRAM, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes one manual page for the program and for each of its commands to a directory.
///
/// # Errors
/// When the directory or a page cannot be written.
pub(crate) fn manual(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    for (name, page) in pages()? {
        let path = directory.join(name);
        std::fs::write(&path, page).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Every page with the name of its file.
fn pages() -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut command = Cli::command();
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, PROGRAM, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: &Command, name: &str, pages: &mut Vec<(PathBuf, Vec<u8>)>) -> Result<()> {
    let shown = command.clone().display_name(name).version(env!("CARGO_PKG_VERSION"));
    let mut page = Vec::new();
    // No date, or two builds of one commit would differ.
    Man::new(shown)
        .title(name.to_uppercase())
        .manual("Ringfence")
        .render(&mut page)?;
    pages.push((format!("{name}.1").into(), page));
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        add_pages(below, &format!("{name}-{}", below.get_name()), pages)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_shell_knows_every_command() {
        for shell in Shell::value_variants() {
            let script = completions_of(*shell);
            for command in Cli::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let pages: BTreeMap<_, _> = pages().unwrap().into_iter().collect();
        let text = |name: &str| String::from_utf8(pages[Path::new(name)].clone()).unwrap();
        assert!(text("ringfence.1").contains("ringfence\\-up(1)") || text("ringfence.1").contains("ringfence-up(1)"));
        // What is only in the long help.
        assert!(text("ringfence-up.1").contains("pause.criu"), "the reference of keys");
        for name in [
            "ringfence-doctor.1",
            "ringfence-key-create.1",
            "ringfence-sandbox-list.1",
        ] {
            assert!(text(name).contains(".SH"), "{name}");
        }
        let one = super::pages().unwrap();
        assert_eq!(one, super::pages().unwrap(), "the same each time");
    }
}
