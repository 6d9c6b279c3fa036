//! The files of the recipes: part of the program, from `templates/` of the repository, which is their one source. A test compares
//! the list with the directory.

/// A recipe that the program carries.
#[derive(Debug)]
pub struct Carried {
    /// Its directory in `templates/`.
    pub name: &'static str,
    /// Paths in the directory, with what the files contain.
    pub files: &'static [(&'static str, &'static str)],
}

/// Files of a recipe, by their paths in its directory.
macro_rules! files {
    ($directory:literal, $($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../../../templates/", $directory, "/", $path)))),+]
    };
}

/// The recipes of `templates/`.
pub(crate) const CARRIED: &[Carried] = &[
    Carried {
        name: "agents",
        files: files!(
            "agents",
            ".dockerignore",
            "Dockerfile",
            "npm/claude/package-lock.json",
            "npm/claude/package.json",
            "npm/codex/package-lock.json",
            "npm/codex/package.json",
            "npm/gemini/package-lock.json",
            "npm/gemini/package.json",
            "npm/opencode/package-lock.json",
            "npm/opencode/package.json",
            "requirements.txt",
            "set-up",
            "template.toml",
        ),
    },
    Carried {
        name: "code-interpreter",
        files: files!(
            "code-interpreter",
            ".dockerignore",
            "Dockerfile",
            "kernel/code_interpreter_kernel/__init__.py",
            "kernel/code_interpreter_kernel/__main__.py",
            "kernel/code_interpreter_kernel/formatters.py",
            "kernel/code_interpreter_kernel/output.py",
            "kernel/code_interpreter_kernel/variables.py",
            "requirements-kernel.txt",
            "requirements-server.txt",
            "server/code_interpreter/__init__.py",
            "server/code_interpreter/__main__.py",
            "server/code_interpreter/access.py",
            "server/code_interpreter/app.py",
            "server/code_interpreter/bash.py",
            "server/code_interpreter/bounds.py",
            "server/code_interpreter/child.py",
            "server/code_interpreter/contexts.py",
            "server/code_interpreter/driver.py",
            "server/code_interpreter/drivers/Cells.java",
            "server/code_interpreter/drivers/cells.R",
            "server/code_interpreter/drivers/node.js",
            "server/code_interpreter/drivers/package-lock.json",
            "server/code_interpreter/drivers/package.json",
            "server/code_interpreter/events.py",
            "server/code_interpreter/jupyter.py",
            "server/code_interpreter/kernel.py",
            "server/code_interpreter/languages.py",
            "server/code_interpreter/requests.py",
            "start",
            "template.toml",
        ),
    },
    Carried {
        name: "desktop",
        files: files!(
            "desktop",
            ".dockerignore",
            "Dockerfile",
            "files/chromium.json",
            "files/firefox.json",
            "files/keep-awake.desktop",
            "files/mimeapps.list",
            "files/set-up",
            "files/xfwm4.xml",
            "template.toml",
        ),
    },
    Carried {
        name: "mcp-gateway",
        files: files!(
            "mcp-gateway",
            ".dockerignore",
            "Dockerfile",
            "gateway/mcp_gateway/__init__.py",
            "gateway/mcp_gateway/__main__.py",
            "gateway/mcp_gateway/asked.py",
            "gateway/mcp_gateway/configuration.py",
            "gateway/mcp_gateway/joined.py",
            "gateway/mcp_gateway/passed.py",
            "gateway/mcp_gateway/serve.py",
            "mcp-gateway",
            "requirements.txt",
            "template.toml",
        ),
    },
];
