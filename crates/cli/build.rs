//! Makes the entry point of the binary the one of `crates/agent/src/spawner/sys.rs`, where there is one.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo says in the environment what a binary is built for"
)]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of = |variable: &str| std::env::var(variable).unwrap_or_default();
    if of("CARGO_CFG_TARGET_ARCH") != "x86_64" || of("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    // A linker only warns of an entry point that does not exist, and begins anywhere; another name for what does not exist is
    // an error.
    for argument in [
        "-Wl,--undefined=ringfence_start",
        "-Wl,--defsym=ringfence_entry=ringfence_start",
        "-Wl,--entry=ringfence_entry",
    ] {
        println!("cargo::rustc-link-arg-bin=ringfence={argument}");
    }
}
