//! Embeds the pages for readers of the product, which are the Markdown files of `docs/` except those for developers, and
//! the pictures in them.
//!
//! The build fails when a page lacks its front matter, so a binary never contains a page without title and description.

#[path = "src/source.rs"]
mod source;

use std::fmt::Write as _;
use std::path::Path;

fn main() -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    // Cargo compares the times of everything below a directory.
    println!("cargo:rerun-if-changed={}", folder.display());
    println!("cargo:rerun-if-changed=src/source.rs");
    let mut files = Vec::new();
    collect(&folder, "", &mut files)?;
    let mut pages = String::from("&[\n");
    for page in source::ordered(&files)? {
        let source::PageSource {
            group,
            route,
            file,
            title,
            description,
            body,
        } = page;
        writeln!(
            pages,
            "Page {{ group: {group:?}, route: {route:?}, file: {file:?}, title: {title:?}, description: {description:?}, body: {body:?} }},"
        )
        .map_err(|error| error.to_string())?;
    }
    pages.push(']');
    #[expect(
        clippy::disallowed_methods,
        reason = "cargo tells a build script where to write by a variable"
    )]
    let out = std::env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    let out = Path::new(&out);
    std::fs::write(out.join("pages.rs"), pages).map_err(|error| format!("write pages.rs: {error}"))?;
    std::fs::write(out.join("pictures.rs"), pictures(&folder.join("pictures"))?)
        .map_err(|error| format!("write pictures.rs: {error}"))
}

/// The list of the pictures that pages show, by their path below `docs/`.
fn pictures(folder: &Path) -> Result<String, String> {
    let told = |error: std::io::Error| format!("read {}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(told)? {
        names.push(entry.map_err(told)?.file_name());
    }
    names.sort();
    let mut list = String::from("&[\n");
    for name in names {
        let name = name.to_str().ok_or("the name of a picture is not UTF-8")?;
        let file = folder.join(name);
        writeln!(
            list,
            "Picture {{ file: {:?}, body: include_bytes!({file:?}) }},",
            format!("/pictures/{name}")
        )
        .map_err(|error| error.to_string())?;
    }
    list.push(']');
    Ok(list)
}

/// Appends path, relative to `docs/`, and text of every page below `folder`.
fn collect(folder: &Path, prefix: &str, files: &mut Vec<(String, String)>) -> Result<(), String> {
    let told = |error: std::io::Error| format!("read {}: {error}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(told)? {
        let path = entry.map_err(told)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let relative = format!("{prefix}{name}");
        if path.is_dir() {
            if !source::is_for_developers(&relative) {
                collect(&path, &format!("{relative}/"), files)?;
            }
        } else if name.ends_with(".md") {
            let text = std::fs::read_to_string(&path).map_err(|error| format!("read {}: {error}", path.display()))?;
            files.push((relative, text));
        }
    }
    Ok(())
}
