//! Clients in C: the calls, misuse, forks, deaths, and the same under valgrind and AddressSanitizer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;

const CALLS: &str = "tests/clients/calls.c";

/// The cases that one process runs alone.
const CASES: [&str; 10] = [
    "streams",
    "waits",
    "in_place",
    "sleeps_often",
    "misuse",
    "messages",
    "threads",
    "message_threads",
    "forks",
    "workers",
];

fn run_case(case: &str) {
    let bench = Bench::new();
    let calls = bench.program(GCC, CALLS, &[]);
    bench.run(bench.command(calls).arg(case));
}

#[test]
fn stream_calls_return_as_header_documents() {
    run_case("streams");
}

#[test]
fn waiting_calls_end_by_time_out_room_or_data() {
    run_case("waits");
}

#[test]
fn spans_are_lent_committed_shown_and_released() {
    run_case("in_place");
}

#[test]
fn sleeps_often_of_c_asks_for_fences() {
    run_case("sleeps_often");
}

#[test]
fn wrong_arguments_fail_with_invalid() {
    run_case("misuse");
}

#[test]
fn messages_arrive_whole_through_c() {
    run_case("messages");
}

#[test]
fn two_threads_share_a_stream_one_for_each_direction() {
    run_case("threads");
}

#[test]
fn two_threads_share_a_message_socket_one_for_each_direction() {
    run_case("message_threads");
}

#[test]
fn child_of_a_fork_gets_an_error_and_harms_nothing() {
    run_case("forks");
}

#[test]
fn worker_forked_before_first_use_works() {
    run_case("workers");
}

#[test]
fn server_calls_functions_of_its_client_in_c() {
    let bench = Bench::new();
    let calls = bench.program(GCC, "tests/clients/calls_back.c", &[]);
    bench.run(&mut bench.command(calls));
}

#[test]
fn peer_that_is_killed_is_dead_to_c() {
    let bench = Bench::new();
    let calls = bench.program(GCC, CALLS, &[]);
    let mut victim = Running::start(bench.command(&calls).arg("victim"));
    assert_eq!(victim.line(), "ready\n");
    let mut survivor = Running::start(bench.command(&calls).arg("survivor"));
    assert_eq!(victim.line(), "serving\n");
    assert_eq!(survivor.line(), "connected\n");
    victim.kill();
    assert!(survivor.wait().success(), "what it said is above");
}

#[test]
fn peer_that_lies_is_corrupt_to_c() {
    let bench = Bench::new();
    let calls = bench.program(GCC, CALLS, &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    let mut liar = Running::start(bench.command(&calls).arg("liar"));
    assert_eq!(liar.line(), "ready\n");
    bench.run(bench.command(&calls).arg("deceived"));
}

#[test]
fn header_and_clients_compile_without_warnings() {
    let bench = Bench::new();
    for compiler in COMPILERS.into_iter().filter(|compiler| is_installed(compiler.program)) {
        let calls = bench.program(compiler, CALLS, &["-O2"]);
        bench.run(bench.command(calls).arg("waits"));
    }
}

#[test]
fn static_library_runs_stream_calls() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("calls");
    let library = static_library();
    // As in `Libs.private` of partywall.pc.
    let flags = [library.to_str().unwrap(), "-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
    compile(GCC, &crate_folder().join(CALLS), &flags, &output);
    let bench = Bench::new();
    bench.run(bench.command(output).env_remove("LD_LIBRARY_PATH").arg("streams"));
}

#[test]
fn clients_are_clean_under_valgrind() {
    if !is_installed("valgrind") {
        return;
    }
    let bench = Bench::new();
    let calls = bench.program(GCC, CALLS, &[]);
    let known = format!("--suppressions={}", crate_folder().join("tests/clients/valgrind.supp").display());
    for case in CASES {
        let mut command = bench.command("valgrind");
        command.arg(&known);
        command.args([
            "--quiet",
            "--error-exitcode=99",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite,indirect",
        ]);
        bench.run(command.arg(&calls).arg(case));
    }
}

#[test]
fn clients_are_clean_under_address_sanitizer() {
    let bench = Bench::new();
    let calls = bench.program(GCC, CALLS, &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    for case in CASES {
        bench.run(bench.command(&calls).env("ASAN_OPTIONS", "detect_leaks=1").arg(case));
    }
}
