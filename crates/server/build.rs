//! Lists the files of the dashboard, so that adding one needs no change of the program.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

fn main() -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dashboard/assets");
    // Cargo compares the times of everything below a directory.
    println!("cargo:rerun-if-changed={}", folder.display());
    let about = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).map_err(about)? {
        files.push(entry.map_err(about)?.file_name());
    }
    files.sort();
    let mut list = String::from("[\n");
    for name in files {
        let name = name.to_str().ok_or("the name of a file is not UTF-8")?;
        let path = folder.join(name);
        writeln!(list, "({name:?}, include_bytes!({path:?}).as_slice()),").map_err(|error| error.to_string())?;
    }
    list.push_str("]\n");
    #[expect(
        clippy::disallowed_methods,
        reason = "cargo tells a build script where to write by a variable"
    )]
    let out = std::env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    fs::write(Path::new(&out).join("dashboard_assets.rs"), list).map_err(|error| format!("write the list: {error}"))
}
