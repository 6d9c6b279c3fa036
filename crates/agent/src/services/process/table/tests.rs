//! How long, and of how many processes, the end can be asked for.

use super::*;

/// A process that runs.
fn begin(table: &Table, pid: u32, tag: Option<&str>) -> u64 {
    let (listener, _) = Process::channel();
    let config = ProcessConfig::default();
    let tag = tag.map(str::to_owned);
    let process = Process::new(pid, config, tag, Input::Nothing, Ownership::default(), listener, None);
    table.insert(Rc::new(process))
}

/// Adds a process that exits with this code.
fn end(table: &Table, pid: u32, tag: Option<&str>, code: i32) {
    let id = begin(table, pid, tag);
    table.reaped(pid, code << 8, false);
    table.retire(id);
}

/// The exit code that a selector leads to; none while the process runs, an error when it is not known.
fn code(table: &Table, pid: Option<u32>, tag: Option<&str>) -> Result<Option<i32>, Code> {
    let tag = tag.map(str::to_owned);
    match table.find(Some(&ProcessSelector { pid, tag })) {
        Ok(Found::Live(_)) => Ok(None),
        Ok(Found::Ended { end, .. }) => Ok(Some(end.exit_code)),
        Err(error) => Err(error.code),
    }
}

#[tokio::test(start_paused = true)]
async fn an_end_is_kept_for_thirty_seconds() {
    let table = Table::default();
    end(&table, 7, Some("t"), 3);
    tokio::time::advance(RETENTION - Duration::from_millis(1)).await;
    assert_eq!(code(&table, Some(7), None), Ok(Some(3)));
    assert_eq!(code(&table, None, Some("t")), Ok(Some(3)));
    // It can be asked for, but not acted on.
    let selector = ProcessSelector {
        pid: Some(7),
        tag: None,
    };
    let error = table
        .find_live(Some(&selector))
        .err()
        .map(|error| (error.code, error.message));
    assert_eq!(error, Some((Code::NotFound, "process with pid 7 not found".to_owned())));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(code(&table, Some(7), None), Err(Code::NotFound));
    assert_eq!(code(&table, None, Some("t")), Err(Code::NotFound));
}

#[tokio::test(start_paused = true)]
async fn a_pid_or_a_tag_that_is_used_again_is_the_new_ones() {
    let table = Table::default();
    end(&table, 7, Some("t"), 3);
    end(&table, 8, Some("other"), 4);
    let again = begin(&table, 7, None);
    assert_eq!(code(&table, Some(7), None), Ok(None));
    assert_eq!(code(&table, None, Some("t")), Err(Code::NotFound));
    begin(&table, 9, Some("other"));
    assert_eq!(code(&table, None, Some("other")), Ok(None));
    assert_eq!(code(&table, Some(8), None), Err(Code::NotFound));
    // Of two with one tag, it is the one that runs.
    begin(&table, 10, Some("same"));
    end(&table, 11, Some("same"), 5);
    assert_eq!(code(&table, None, Some("same")), Ok(None));
    table.reaped(7, 6 << 8, false);
    table.retire(again);
    assert_eq!(code(&table, Some(7), None), Ok(Some(6)));
}

#[tokio::test(start_paused = true)]
async fn no_more_ends_are_kept_than_there_is_room_for() {
    let table = Table::default();
    let most = u32::try_from(RETAINED).unwrap();
    for pid in 2..2 + most {
        end(&table, pid, None, 1);
    }
    assert_eq!(code(&table, Some(2), None), Ok(Some(1)));
    end(&table, 2 + most, None, 1);
    assert_eq!(code(&table, Some(2), None), Err(Code::NotFound));
    assert_eq!(code(&table, Some(3), None), Ok(Some(1)));
    assert_eq!(code(&table, Some(2 + most), None), Ok(Some(1)));
    // Nor is a tag that nobody would keep by heart.
    for (length, kept) in [(RETAINED_TAG, true), (RETAINED_TAG + 1, false)] {
        let tag = "t".repeat(length);
        end(&table, 5000, Some(&tag), 1);
        assert_eq!(code(&table, None, Some(&tag)).is_ok(), kept);
        assert_eq!(code(&table, Some(5000), None), Ok(Some(1)));
    }
}
