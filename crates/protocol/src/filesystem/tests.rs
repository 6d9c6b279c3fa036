//! The two encodings of the messages, against literal bytes.

use super::*;
use crate::connect::Codec;

fn check<M: crate::connect::Message + PartialEq + fmt::Debug>(message: &M, json: &str, proto: &[u8]) {
    assert_eq!(Codec::Json.encode(message), json);
    assert_eq!(Codec::Proto.encode(message), proto);
    assert_eq!(&Codec::Json.decode::<M>(json.as_bytes()).unwrap(), message);
    assert_eq!(&Codec::Proto.decode::<M>(proto).unwrap(), message);
}

#[test]
fn both_encodings() {
    let entry = EntryInfo {
        name: "a".to_owned(),
        kind: file_type::FILE,
        path: "/a".to_owned(),
        size: 5_000_000_000,
        mode: 0o644,
        permissions: "-rw-r--r--".to_owned(),
        owner: "u".to_owned(),
        group: "g".to_owned(),
        modified_time: Timestamp::new(1, 500_000_000),
        symlink_target: Some("/b".to_owned()),
        metadata: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
    };
    check(
        &EntryResponse { entry: Some(entry) },
        r#"{"entry":{"name":"a","type":"FILE_TYPE_FILE","path":"/a","size":"5000000000","mode":420,"permissions":"-rw-r--r--","owner":"u","group":"g","modifiedTime":"1970-01-01T00:00:01.500Z","symlinkTarget":"/b","metadata":{"k":"v"}}}"#,
        b"\x0a\x3a\x0a\x01a\x10\x01\x1a\x02/a\x20\x80\xe4\x97\xd0\x12\x28\xa4\x03\x32\x0a-rw-r--r--\x3a\x01u\x42\x01g\x4a\x08\x08\x01\x10\x80\xca\xb5\xee\x01\x52\x02/b\x5a\x06\x0a\x01k\x12\x01v",
    );
    check(
        &WatchDirResponse {
            filesystem: Some(FilesystemEvent {
                name: "s/f".to_owned(),
                kind: event_type::CHMOD,
                entry: None,
            }),
            ..WatchDirResponse::default()
        },
        r#"{"filesystem":{"name":"s/f","type":"EVENT_TYPE_CHMOD"}}"#,
        b"\x12\x07\x0a\x03s/f\x10\x05",
    );
    check(
        &WatchRequest {
            path: "p".to_owned(),
            recursive: true,
            include_entry: true,
            allow_network_mounts: true,
        },
        r#"{"path":"p","recursive":true,"includeEntry":true,"allowNetworkMounts":true}"#,
        b"\x0a\x01p\x10\x01\x18\x01\x20\x01",
    );
    check(
        &WatcherName {
            watcher_id: "w1".to_owned(),
        },
        r#"{"watcherId":"w1"}"#,
        b"\x0a\x02w1",
    );
    check(
        &WatchDirResponse {
            keepalive: Some(Empty {}),
            ..WatchDirResponse::default()
        },
        r#"{"keepalive":{}}"#,
        b"\x1a\x00",
    );
}

#[test]
fn times() {
    let check = |seconds, nanos, expect: &str| {
        let time = Timestamp::new(seconds, nanos).unwrap();
        let json = serde_json::to_string(&time).unwrap();
        assert_eq!(json, format!("\"{expect}\""));
        assert_eq!(serde_json::from_str::<Timestamp>(&json).unwrap(), time);
    };
    check(0, 0, "1970-01-01T00:00:00Z");
    check(0, 1, "1970-01-01T00:00:00.000000001Z");
    check(0, 1_000, "1970-01-01T00:00:00.000001Z");
    check(-1, 999_000_000, "1969-12-31T23:59:59.999Z");
    check(-62_135_596_800, 0, "0001-01-01T00:00:00Z");
    check(253_402_207_199, 0, "9999-12-30T21:59:59Z");
    assert_eq!(Timestamp::new(253_402_207_200, 0), None);
    assert_eq!(Timestamp::new(-62_135_596_801, 0), None);
}

#[test]
fn lenient_input() {
    let request: WatchRequest = Codec::Json
        .decode(br#"{"path":null,"include_entry":true,"allow_network_mounts":true,"unknown":1}"#)
        .unwrap();
    assert!(request.include_entry && request.allow_network_mounts && request.path.is_empty());
    let name: WatcherName = Codec::Json.decode(br#"{"watcher_id":"w"}"#).unwrap();
    assert_eq!(name.watcher_id, "w");
    let list: ListDirRequest = Codec::Json.decode(br#"{"depth":"3"}"#).unwrap();
    assert_eq!(list.depth, 3);
}
