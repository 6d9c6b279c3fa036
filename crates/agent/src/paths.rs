//! What a path in a request means.
//!
//! Empty is the default workdir or the home; `~` is the home; absolute is taken as it is, not even cleaned; relative
//! is below the home, never below the workdir. No permission is checked here or later: files are handled as root,
//! and the user only says where `~` is and who owns what is made.

use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// `~other`: the home of another user is not expanded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to expand path '{path}' for user '{user}': cannot expand user-specific home dir")]
pub(crate) struct ForeignHome {
    path: String,
    user: String,
}

/// The file that `path` means for `user`.
///
/// # Errors
/// [`ForeignHome`].
pub(crate) fn resolve(path: &str, user: &User, default_workdir: Option<&str>) -> Result<PathBuf, ForeignHome> {
    if path.is_empty() {
        return Ok(default_workdir.map_or_else(|| user.home.clone(), PathBuf::from));
    }
    if let Some(rest) = path.strip_prefix('~') {
        return match rest.strip_prefix(['/', '\\']) {
            Some(below) => Ok(clean(&user.home.join(below.trim_start_matches('/')))),
            None if rest.is_empty() => Ok(user.home.clone()),
            None => Err(ForeignHome {
                path: path.to_owned(),
                user: user.name.clone(),
            }),
        };
    }
    if path.starts_with('/') {
        return Ok(PathBuf::from(path));
    }
    Ok(clean(&user.home.join(path)))
}

/// Removes `.` and resolves `..` by text, as far as the root.
pub(crate) fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_mean_files() {
        let user = User {
            name: "user".to_owned(),
            uid: 1000,
            gid: 1000,
            home: PathBuf::from("/home/user"),
            has_one_group: false,
        };
        let check = |path: &str, workdir: Option<&str>, expect: &str| {
            assert_eq!(resolve(path, &user, workdir).unwrap(), Path::new(expect), "{path}");
        };
        check("", None, "/home/user");
        check("", Some("/work"), "/work");
        check("~", Some("/work"), "/home/user");
        check("~/a/../b", None, "/home/user/b");
        check("~\\a", None, "/home/user/a");
        check("~//etc", None, "/home/user/etc");
        check("a", Some("/work"), "/home/user/a");
        check("./a/./b/", None, "/home/user/a/b");
        check("../../../etc/passwd", None, "/etc/passwd");
        check("/a/../b/", None, "/a/../b/");
        check("a~", None, "/home/user/a~");
        let error = resolve("~root/x", &user, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "failed to expand path '~root/x' for user 'user': cannot expand user-specific home dir"
        );
    }
}
