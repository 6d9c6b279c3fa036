//! The file system service, every unary method in both codecs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use protocol::connect::{Code, Codec, Error, Message};
use protocol::filesystem::{
    EntryInfo, EntryResponse, ListDirRequest, ListDirResponse, MoveRequest, PathRequest, file_type,
};
use protocol::process::Empty;

use crate::client::Client;
use crate::sandbox::Sandbox;

pub(crate) const CODECS: [Codec; 2] = [Codec::Json, Codec::Proto];

/// A unary call of the file system service.
pub(crate) async fn call<O: Message>(
    client: &mut Client,
    codec: Codec,
    method: &str,
    message: &impl Message,
) -> Result<O, Error> {
    client
        .call(codec, &format!("/filesystem.Filesystem/{method}"), message)
        .await
}

pub(crate) fn path(path: &(impl ToString + ?Sized)) -> PathRequest {
    PathRequest { path: path.to_string() }
}

async fn entry(client: &mut Client, codec: Codec, method: &str, message: &impl Message) -> Result<EntryInfo, Error> {
    let response: EntryResponse = call(client, codec, method, message).await?;
    Ok(response.entry.expect("an entry"))
}

/// Asserts the code and the beginning of the message.
fn failed<T: std::fmt::Debug>(result: Result<T, Error>, code: Code, message: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.code, code, "{error}");
    assert!(error.message.starts_with(message), "{error}");
}

#[tokio::test]
async fn stat_tells_all_about_an_entry() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user");
    fs::write(home.join("file"), "12345").unwrap();
    fs::set_permissions(home.join("file"), PermissionsExt::from_mode(0o4640)).unwrap();
    std::os::unix::fs::chown(home.join("file"), Some(1000), Some(2000)).unwrap();
    // Changing the owner took the bit away.
    fs::set_permissions(home.join("file"), PermissionsExt::from_mode(0o4640)).unwrap();
    rustix::fs::setxattr(home.join("file"), "user.e2b.k", b"v", rustix::fs::XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(
        home.join("file"),
        "user.e2b.bad",
        b"\xff",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    rustix::fs::setxattr(home.join("file"), "user.other", b"v", rustix::fs::XattrFlags::empty()).unwrap();
    fs::create_dir(home.join("directory")).unwrap();
    fs::set_permissions(home.join("directory"), PermissionsExt::from_mode(0o1777)).unwrap();
    std::os::unix::fs::chown(home.join("directory"), Some(4242), Some(4243)).unwrap();
    symlink("file", home.join("link")).unwrap();
    symlink("link", home.join("second")).unwrap();
    symlink("nowhere", home.join("broken")).unwrap();
    symlink("circle", home.join("circle")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        home.join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let shown = |name: &str| home.join(name).display().to_string();

    for codec in CODECS {
        let mut stat = async |name: &str| entry(&mut client, codec, "Stat", &path(name)).await;
        let file = stat("file").await.unwrap();
        let metadata = fs::metadata(home.join("file")).unwrap();
        let modified = file.modified_time.unwrap();
        assert_eq!(
            (modified.seconds, i64::from(modified.nanos)),
            (metadata.mtime(), metadata.mtime_nsec())
        );
        assert_eq!(
            (file.name.as_str(), file.path.as_str()),
            ("file", shown("file").as_str())
        );
        assert_eq!((file.kind, file.size, file.mode), (file_type::FILE, 5, 0o640));
        assert_eq!(file.permissions, "urw-r-----");
        assert_eq!((file.owner.as_str(), file.group.as_str()), ("user", "extra"));
        assert_eq!(file.symlink_target, None);
        assert_eq!(
            file.metadata.into_iter().collect::<Vec<_>>(),
            [("k".to_owned(), "v".to_owned())]
        );

        let directory = stat("~/directory").await.unwrap();
        assert_eq!((directory.kind, directory.mode), (file_type::DIRECTORY, 0o777));
        assert_eq!(directory.permissions, "dtrwxrwxrwx");
        assert_eq!((directory.owner.as_str(), directory.group.as_str()), ("4242", "4243"));

        for name in ["link", "second"] {
            let link = stat(name).await.unwrap();
            assert_eq!((link.kind, link.mode), (file_type::FILE, 0o640), "{name}");
            assert_eq!((link.size, link.permissions.as_str()), (4, "Lrwxrwxrwx"));
            assert_eq!(link.symlink_target, Some(shown("file")));
        }
        for name in ["broken", "circle"] {
            let link = stat(name).await.unwrap();
            assert_eq!((link.kind, link.mode), (file_type::UNSPECIFIED, 0), "{name}");
            assert_eq!(link.symlink_target, Some(shown(name)));
        }
        let fifo = stat("fifo").await.unwrap();
        assert_eq!(
            (fifo.kind, fifo.permissions.as_str()),
            (file_type::UNSPECIFIED, "pr--------")
        );
        assert_eq!(stat("/").await.unwrap().name, "/");
        assert_eq!(stat("").await.unwrap().path, home.display().to_string());

        failed(stat("none").await, Code::NotFound, "file not found: ");
        failed(stat("file/below").await, Code::Internal, "error getting file info: ");
        failed(
            stat("~root").await,
            Code::InvalidArgument,
            "failed to expand path '~root'",
        );
        failed(stat("a\0b").await, Code::Internal, "error getting file info: ");
    }
    // Nobody has these names.
    let mut stranger = sandbox.client().await.user("nobody");
    assert_eq!(stranger.post("/filesystem.Filesystem/Stat", "{}").await.status, 401);
    assert_eq!(client.post("/filesystem.Filesystem/Chmod", "{}").await.status, 404);
}

#[tokio::test]
async fn directories_are_made_for_the_user() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user");
    fs::write(home.join("file"), "").unwrap();
    symlink("nowhere", home.join("broken")).unwrap();
    for (codec, name) in CODECS.into_iter().zip(["json", "proto"]) {
        let mut make = async |name: &str| entry(&mut client, codec, "MakeDir", &path(name)).await;
        let made = make(&format!("{name}/a/b")).await.unwrap();
        assert_eq!((made.name.as_str(), made.kind), ("b", file_type::DIRECTORY));
        assert_eq!(
            (made.mode, made.owner.as_str(), made.group.as_str()),
            (0o755, "user", "user")
        );
        for below in ["", "a", "a/b"] {
            let metadata = fs::metadata(home.join(name).join(below)).unwrap();
            assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (1000, 0o755), "{below}");
        }
        failed(
            make(&format!("{name}/a")).await,
            Code::AlreadyExists,
            "directory already exists: ",
        );
        failed(
            make("file").await,
            Code::InvalidArgument,
            "path already exists but it is not a directory: ",
        );
        failed(make("file/below").await, Code::Internal, "error ");
        failed(make("broken").await, Code::Internal, "error creating directory");
        failed(make("~other/x").await, Code::InvalidArgument, "failed to expand");
    }
}

#[tokio::test]
async fn entries_are_moved() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user");
    for codec in CODECS {
        let mut rename = async |source: &str, destination: &str| {
            let message = MoveRequest {
                source: source.to_owned(),
                destination: destination.to_owned(),
            };
            entry(&mut client, codec, "Move", &message).await
        };
        fs::write(home.join("source"), "new").unwrap();
        fs::write(home.join("target"), "old").unwrap();
        let moved = rename("source", "target").await.unwrap();
        assert_eq!((moved.name.as_str(), moved.size), ("target", 3));
        // It stays whose it was.
        assert_eq!(moved.owner, "root");
        assert!(!home.join("source").exists());
        let moved = rename("target", "new/parents/target").await.unwrap();
        assert_eq!(moved.path, home.join("new/parents/target").display().to_string());
        assert_eq!(fs::metadata(home.join("new/parents")).unwrap().uid(), 1000);
        // A whole directory, and over an empty one.
        fs::create_dir_all(home.join("empty")).unwrap();
        rename("new", "empty").await.unwrap();
        assert!(home.join("empty/parents/target").exists());

        failed(
            rename("none", "made/for/nothing").await,
            Code::NotFound,
            "source file not found: ",
        );
        assert!(!home.join("made").exists());
        fs::write(home.join("file"), "").unwrap();
        failed(rename("file", "empty").await, Code::Internal, "error renaming: ");
        fs::create_dir_all(home.join("other")).unwrap();
        failed(rename("other", "empty").await, Code::Internal, "error renaming: ");
        failed(rename("file", "/proc/file").await, Code::Internal, "error renaming: ");
        failed(rename("file", "~x").await, Code::InvalidArgument, "failed to expand");
        fs::remove_dir_all(home.join("empty")).unwrap();
    }
}

fn names(entries: &[EntryInfo], below: &std::path::Path) -> Vec<String> {
    let relative = |entry: &EntryInfo| {
        let path = entry.path.strip_prefix(below.to_str().unwrap()).unwrap();
        path.trim_start_matches('/').to_owned()
    };
    entries.iter().map(relative).collect()
}

#[tokio::test]
async fn directories_are_listed() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user");
    let tree = home.join("tree");
    fs::create_dir_all(tree.join("b/x/deep")).unwrap();
    fs::create_dir_all(tree.join("a-")).unwrap();
    fs::write(tree.join("b/B"), "").unwrap();
    fs::write(tree.join("b/a"), "").unwrap();
    fs::write(tree.join("Z"), "").unwrap();
    symlink("b", tree.join("c")).unwrap();
    symlink("tree", home.join("way")).unwrap();
    symlink("two", home.join("one")).unwrap();
    symlink("one", home.join("two")).unwrap();
    fs::write(home.join("file"), "").unwrap();
    // A longer chain than the kernel follows, and one that is too long even here.
    symlink("tree", home.join("chain0")).unwrap();
    for number in 1..300 {
        symlink(format!("chain{}", number - 1), home.join(format!("chain{number}"))).unwrap();
    }
    for codec in CODECS {
        let mut list = async |path: &str, depth| {
            let message = ListDirRequest {
                path: path.to_owned(),
                depth,
            };
            let response: ListDirResponse = call(&mut client, codec, "ListDir", &message).await?;
            Ok::<_, Error>(response.entries)
        };
        for depth in [0, 1] {
            assert_eq!(names(&list("tree", depth).await.unwrap(), &tree), ["Z", "a-", "b", "c"]);
        }
        let two = ["Z", "a-", "b", "b/B", "b/a", "b/x", "c"];
        assert_eq!(names(&list("tree", 2).await.unwrap(), &tree), two);
        let all = ["Z", "a-", "b", "b/B", "b/a", "b/x", "b/x/deep", "c"];
        assert_eq!(names(&list("tree", u32::MAX).await.unwrap(), &tree), all);
        // Through a link, under the name that was asked for.
        let entries = list("way", 9).await.unwrap();
        assert_eq!(names(&entries, &home.join("way")), all);
        assert_eq!(entries[7].kind, file_type::DIRECTORY);
        assert_eq!(entries[7].symlink_target, Some(tree.join("b").display().to_string()));
        assert_eq!(list("chain250", 1).await.unwrap().len(), 4);
        let untidy = format!("{}/../user//tree/", home.display());
        assert_eq!(names(&list(&untidy, 1).await.unwrap(), &tree), ["Z", "a-", "b", "c"]);
        assert_eq!(list("tree/a-", 5).await.unwrap(), []);

        failed(list("none", 1).await, Code::NotFound, "path not found: ");
        failed(
            list("file", 1).await,
            Code::InvalidArgument,
            "path is not a directory: ",
        );
        failed(
            list("one", 1).await,
            Code::FailedPrecondition,
            "cyclic symlink or chain >255 links at ",
        );
        failed(list("chain299", 1).await, Code::FailedPrecondition, "cyclic symlink");
        failed(list("file/x", 1).await, Code::Internal, "error getting file info: ");
        failed(list("~x", 1).await, Code::InvalidArgument, "failed to expand");
    }
}

#[tokio::test]
async fn hostile_trees_are_listed_within_bounds() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let root = sandbox.path("hostile");
    fs::create_dir(&root).unwrap();
    let list = |path: &std::path::Path, depth| ListDirRequest {
        path: path.display().to_string(),
        depth,
    };
    // Names that are no text are shown as far as they are.
    use std::os::unix::ffi::OsStrExt;
    fs::create_dir(root.join("names")).unwrap();
    fs::write(root.join("names").join(std::ffi::OsStr::from_bytes(b"a\xffb")), "").unwrap();
    let response: ListDirResponse = call(&mut client, Codec::Json, "ListDir", &list(&root.join("names"), 1))
        .await
        .unwrap();
    assert_eq!(response.entries[0].name, "a\u{fffd}b");

    // So deep that no path leads to the end.
    let deep = root.join("deep");
    fs::create_dir(&deep).unwrap();
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let mode = rustix::fs::Mode::RWXU;
    let mut at = rustix::fs::open(&deep, flags, mode).unwrap();
    for _ in 0..5000 {
        rustix::fs::mkdirat(&at, c"d", mode).unwrap();
        at = rustix::fs::openat(&at, c"d", flags, mode).unwrap();
    }
    let result: Result<ListDirResponse, _> = call(&mut client, Codec::Proto, "ListDir", &list(&deep, u32::MAX)).await;
    failed(result, Code::Internal, "error ");

    let wide = root.join("wide");
    fs::create_dir(&wide).unwrap();
    for number in 0..100_000 {
        fs::File::create(wide.join(format!("{number:06}"))).unwrap();
    }
    let before = sandbox.memory("VmHWM");
    let message = list(&wide, 1);
    let listing = call::<ListDirResponse>(&mut client, Codec::Json, "ListDir", &message);
    // Others are served meanwhile.
    let mut other = sandbox.client().await;
    let (result, answer) = tokio::join!(listing, other.get("/health"));
    assert_eq!(answer.status, 204);
    failed(result, Code::FailedPrecondition, "the entries do not fit");
    let growth = sandbox.memory("VmHWM") - before;
    assert!(growth < 64 * 1024, "{growth} kB");
    for number in 40_000..100_000 {
        fs::remove_file(wide.join(format!("{number:06}"))).unwrap();
    }
    let response: ListDirResponse = call(&mut client, Codec::Json, "ListDir", &message).await.unwrap();
    assert_eq!(response.entries.len(), 40_000);
    assert_eq!(response.entries[39_999].name, "039999");

    let Empty {} = call(&mut client, Codec::Proto, "Remove", &path(&root.display()))
        .await
        .unwrap();
    assert!(!root.exists());
}

#[tokio::test]
async fn entries_are_removed() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user");
    for codec in CODECS {
        let mut remove = async |name: &str| call::<Empty>(&mut client, codec, "Remove", &path(name)).await;
        fs::create_dir_all(home.join("tree/a/b")).unwrap();
        fs::write(home.join("tree/a/file"), "").unwrap();
        fs::write(home.join("file"), "").unwrap();
        fs::create_dir_all(home.join("kept/x")).unwrap();
        symlink("../kept", home.join("tree/link")).unwrap();
        for name in ["tree", "tree", "file", "none", "none/below"] {
            remove(name).await.unwrap();
            assert!(!home.join(name).exists());
        }
        assert!(home.join("kept/x").exists());
        fs::write(home.join("file"), "").unwrap();
        failed(
            remove("file/x").await,
            Code::Internal,
            "error removing file or directory: ",
        );
        failed(
            remove("/proc/self").await,
            Code::Internal,
            "error removing file or directory: ",
        );
        failed(remove("/").await, Code::Internal, "error removing file or directory: ");
        failed(remove("~x").await, Code::InvalidArgument, "failed to expand");
    }
}

#[tokio::test]
async fn the_old_client_gets_the_old_fields() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    fs::create_dir(sandbox.path("d")).unwrap();
    fs::write(sandbox.path("d/file"), "x").unwrap();
    let shown = sandbox.path("d").display().to_string();
    let body = format!(r#"{{"path":"{shown}"}}"#);
    let mut old = sandbox.client().await.with("user-agent", "connect-python");
    let answer = old.post("/filesystem.Filesystem/Stat", &body).await;
    assert_eq!(answer.header("x-e2b-legacy-sdk"), "true");
    let expect = format!(r#"{{"entry":{{"name":"d","type":"FILE_TYPE_DIRECTORY","path":"{shown}"}}}}"#);
    assert_eq!(answer.text(), expect);
    let answer = old.post("/filesystem.Filesystem/ListDir", &body).await;
    let expect = format!(r#"{{"entries":[{{"name":"file","type":"FILE_TYPE_FILE","path":"{shown}/file"}}]}}"#);
    assert_eq!(answer.text(), expect);

    let mut new = sandbox.client().await.with("user-agent", "connect-python/1");
    let answer = new.post("/filesystem.Filesystem/Stat", &body).await;
    assert_eq!(answer.header("x-e2b-legacy-sdk"), "");
    assert!(answer.text().contains("permissions"));
}
