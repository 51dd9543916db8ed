use super::*;

#[test]
fn every_rank_is_in_one_communicator_of_a_kind() {
    assert_eq!(members(1, 1), [[0], [0]], "one rank that is to use NCCL nevertheless");
    assert_eq!(members(3, 1), [[0, 1, 2], [0, 1, 2]]);
    assert_eq!(members(2, 2), [[0, 1]]);
    assert_eq!(members(4, 2), [[0, 2], [0, 2], [1, 3], [1, 3], [0, 1], [2, 3]]);
}

#[test]
fn versions_are_written_as_nccl_writes_them() {
    assert_eq!([23007, 22809, 2708, LEAST].map(version_text), ["2.30.7", "2.28.9", "2.7.8", "2.18.0"]);
}

#[test]
fn what_nccl_cannot_add_up_is_refused() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32] {
        assert!([What::AllReduce, What::AllGather, What::ReduceScatter, What::AllToAll].iter().all(|w| can(*w, dtype).is_ok()));
        assert_eq!(kind_of(dtype).1, dtype.size());
    }
    assert!(can(What::AllGather, DType::U8).is_ok() && can(What::ReduceScatter, DType::U8).is_err());
}

/// Where the library is not there, or is something else, the error says how to get it.
#[test]
fn a_library_that_cannot_be_used_says_how_to_get_it() {
    let said = find(&Folders::default()).problem();
    assert!(said.is_none_or(|said| said.contains("nvidia-nccl-cu13") && said.contains("libnccl")));
    let dir = std::env::temp_dir().join(format!("kiln-nccl-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("libnccl.so.2"), "no library").unwrap();
    let other = found(&NCCL, &Folders { libraries: vec![dir.clone()], ..Folders::default() });
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(other.path.is_some() || other.problem().unwrap().contains("does not load"), "{other:?}");
}
