//! Messages of the service `filesystem.Filesystem`: file system entries of the sandbox and changes to them.
//!
//! Field numbers and JSON names are fixed by the clients. A oneof is written as optional fields, as in
//! [`crate::process`]. Zero values are left out of JSON.

use std::collections::BTreeMap;
use std::fmt;

use prost::Message;
use serde::{Deserialize, Serialize};

use crate::connect::json;
use crate::process::Empty;

/// Path prefix of the service's methods.
pub const SERVICE: &str = "/filesystem.Filesystem/";

/// A point in time. In JSON it is RFC 3339 text, so only the years 1 to 9999 can be represented.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Timestamp {
    /// Seconds since 1970 in UTC.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// Nanoseconds within the second.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl Timestamp {
    /// Creates a timestamp; `None` if RFC 3339 cannot represent it.
    #[must_use]
    pub fn new(seconds: i64, nanos: i32) -> Option<Self> {
        // From the first second of year 1 to one day before the end of year 9999, the maximum of jiff.
        let expressible = (-62_135_596_800..253_402_207_200).contains(&seconds) && (0..1_000_000_000).contains(&nanos);
        expressible.then_some(Self { seconds, nanos })
    }
}

impl Serialize for Timestamp {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let time = jiff::Timestamp::new(self.seconds, self.nanos).map_err(serde::ser::Error::custom)?;
        // The JSON mapping uses zero, three, six or nine digits.
        let digits = match self.nanos {
            0 => 0,
            nanos if nanos % 1_000_000 == 0 => 3,
            nanos if nanos % 1_000 == 0 => 6,
            _ => 9,
        };
        to.collect_str(&format_args!("{time:.digits$}"))
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let time: jiff::Timestamp = text.parse().map_err(serde::de::Error::custom)?;
        let (mut seconds, mut nanos) = (time.as_second(), time.subsec_nanosecond());
        if nanos < 0 {
            (seconds, nanos) = (seconds - 1, nanos + 1_000_000_000);
        }
        Self::new(seconds, nanos).ok_or_else(|| serde::de::Error::custom("time out of range"))
    }
}

/// The enum `FileType`: numbers in binary, names in JSON.
pub mod file_type {
    use serde::{Deserializer, Serializer};

    use super::json;

    pub const UNSPECIFIED: i32 = 0;
    pub const FILE: i32 = 1;
    pub const DIRECTORY: i32 = 2;
    pub const SYMLINK: i32 = 3;

    const NAMES: &[(&str, i32)] = &[
        ("FILE_TYPE_UNSPECIFIED", UNSPECIFIED),
        ("FILE_TYPE_FILE", FILE),
        ("FILE_TYPE_DIRECTORY", DIRECTORY),
        ("FILE_TYPE_SYMLINK", SYMLINK),
    ];

    /// Writes the name.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
        json::enumeration_name(*number, to, NAMES)
    }

    /// Reads a name or a number.
    ///
    /// # Errors
    /// When it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        json::enumeration(from, NAMES)
    }
}

/// The enum `EventType`: numbers in binary, names in JSON.
pub mod event_type {
    use serde::{Deserializer, Serializer};

    use super::json;

    pub const CREATE: i32 = 1;
    pub const WRITE: i32 = 2;
    pub const REMOVE: i32 = 3;
    pub const RENAME: i32 = 4;
    pub const CHMOD: i32 = 5;

    const NAMES: &[(&str, i32)] = &[
        ("EVENT_TYPE_UNSPECIFIED", 0),
        ("EVENT_TYPE_CREATE", CREATE),
        ("EVENT_TYPE_WRITE", WRITE),
        ("EVENT_TYPE_REMOVE", REMOVE),
        ("EVENT_TYPE_RENAME", RENAME),
        ("EVENT_TYPE_CHMOD", CHMOD),
    ];

    /// Writes the name.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
        json::enumeration_name(*number, to, NAMES)
    }

    /// Reads a name or a number.
    ///
    /// # Errors
    /// When it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        json::enumeration(from, NAMES)
    }
}

/// A 64-bit number, encoded in JSON as text because JSON numbers lose digits.
mod int64 {
    use serde::{Deserializer, Serializer};

    use super::json;

    pub(super) fn serialize<S: Serializer>(number: &i64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
        json::number(from)
    }
}

/// One entry of a directory.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[prost(skip_debug)]
#[serde(rename_all = "camelCase", default)]
pub struct EntryInfo {
    /// The last part of the path.
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Type of the entry, one of [`file_type`]; for a link, the type of its final target.
    #[prost(int32, tag = "2")]
    #[serde(rename = "type", with = "file_type", skip_serializing_if = "json::is_default")]
    pub kind: i32,
    #[prost(string, tag = "3")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Size in bytes; for a link, the length of its text.
    #[prost(int64, tag = "4")]
    #[serde(with = "int64", skip_serializing_if = "json::is_default")]
    pub size: i64,
    /// The nine permission bits; for a link, those of its final target.
    #[prost(uint32, tag = "5")]
    #[serde(deserialize_with = "json::number", skip_serializing_if = "json::is_default")]
    pub mode: u32,
    /// Type and permission letters; for a link, its own.
    #[prost(string, tag = "6")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub permissions: String,
    #[prost(string, tag = "7")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub owner: String,
    #[prost(string, tag = "8")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[prost(message, optional, tag = "9")]
    #[serde(alias = "modified_time", skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<Timestamp>,
    /// The final target of a link; its own path if the link is broken.
    #[prost(string, optional, tag = "10")]
    #[serde(alias = "symlink_target", skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Metadata that clients attached to the file.
    #[prost(btree_map = "string, string", tag = "11")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

impl fmt::Debug for EntryInfo {
    /// Omits the metadata, which belongs to the client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EntryInfo")
            .field("path", &self.path)
            .field("kind", &self.kind)
            .field("size", &self.size)
            .field("permissions", &self.permissions)
            .finish_non_exhaustive()
    }
}

/// A change of an entry of a watched directory.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FilesystemEvent {
    /// Path relative to the watched directory; `.` is that directory.
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Type of the event, one of [`event_type`].
    #[prost(int32, tag = "2")]
    #[serde(rename = "type", with = "event_type", skip_serializing_if = "json::is_default")]
    pub kind: i32,
    /// The entry shortly after the change.
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// Request of `Stat`, `MakeDir` and `Remove`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PathRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub path: String,
}

/// Request of `Move`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MoveRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub source: String,
    #[prost(string, tag = "2")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub destination: String,
}

/// Response of `Stat`, `MakeDir` and `Move`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// Request of `ListDir`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListDirRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Number of levels; zero means one.
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "json::number", skip_serializing_if = "json::is_default")]
    pub depth: u32,
}

/// Response of `ListDir`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListDirResponse {
    /// Each directory before its contents, names in byte order.
    #[prost(message, repeated, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<EntryInfo>,
}

/// Request of `WatchDir` and `CreateWatcher`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Whether everything below the directory is watched, also directories that are created later.
    #[prost(bool, tag = "2")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "json::is_default")]
    pub recursive: bool,
    /// Whether events include their entry.
    #[prost(bool, tag = "3")]
    #[serde(
        alias = "include_entry",
        deserialize_with = "json::or_default",
        skip_serializing_if = "json::is_default"
    )]
    pub include_entry: bool,
    /// Watch a network file system, too, although only changes made on this machine are seen.
    #[prost(bool, tag = "4")]
    #[serde(
        alias = "allow_network_mounts",
        deserialize_with = "json::or_default",
        skip_serializing_if = "json::is_default"
    )]
    pub allow_network_mounts: bool,
}

/// One message of the stream `WatchDir`; exactly one field is set.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchDirResponse {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Empty>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemEvent>,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

/// Name of a polled watcher: response of `CreateWatcher`, request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatcherName {
    #[prost(string, tag = "1")]
    #[serde(
        alias = "watcher_id",
        deserialize_with = "json::or_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub watcher_id: String,
}

/// Response of `GetWatcherEvents`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatcherEvents {
    #[prost(message, repeated, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<FilesystemEvent>,
}

#[cfg(test)]
mod tests;
