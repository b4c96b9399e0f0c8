//! The examples in C do what they say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;

fn echoes(server: &str) {
    let bench = Bench::new();
    let server = bench.program(GCC, server, &[]);
    let client = bench.program(GCC, "examples/echo_client.c", &[]);
    let mut server = Running::start(&mut bench.command(server));
    assert_eq!(server.line(), "offering web:echo\n");
    for words in ["hello", "two words"] {
        let output = bench.run(bench.command(&client).arg(words));
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{words}\n"));
    }
    server.kill();
    let alone = bench.command(&client).output().unwrap();
    let complaint = String::from_utf8_lossy(&alone.stderr);
    assert!(!alone.status.success() && complaint.contains("web"), "{complaint}");
}

#[test]
fn echo_server_in_c_echoes() {
    echoes("examples/echo_server.c");
}

#[test]
fn poll_server_in_c_echoes() {
    echoes("examples/poll_server.c");
}

#[test]
fn messages_in_c_arrive_in_order() {
    let bench = Bench::new();
    let messages = bench.program(GCC, "examples/messages.c", &[]);
    let mut server = Running::start(bench.command(&messages).arg("serve"));
    assert_eq!(server.line(), "offering shop:orders\n");
    bench.run(bench.command(&messages).args(["send", "two apples", "one pear"]));
    assert_eq!(server.line(), "order: two apples\n");
    assert_eq!(server.line(), "order: one pear\n");
    assert!(server.wait().success());
}

#[test]
fn calls_in_c_pass_numbers_and_a_list_in_place() {
    let bench = Bench::new();
    let server = bench.program(GCC, "examples/rpc_server.c", &["-lm"]);
    let mut server = Running::start(&mut bench.command(server));
    assert_eq!(server.line(), "serving web:math\n");
    for compiler in COMPILERS {
        if !is_installed(compiler.program) {
            continue;
        }
        let client = bench.program(compiler, "examples/rpc_client.c", &[]);
        let output = bench.run(&mut bench.command(client));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "2^10 = 1024\n1 + ... + 1000 = 500500\n");
    }
    let client = bench.program(GCC, "examples/rpc_client.c", &["-fsanitize=address,undefined"]);
    bench.run(&mut bench.command(client));
    if is_installed("valgrind") {
        let client = bench.program(GCC, "examples/rpc_client.c", &[]);
        let mut valgrind = bench.command("valgrind");
        valgrind.arg(format!("--suppressions={}", crate_folder().join("tests/clients/valgrind.supp").display()));
        valgrind.args([
            "--quiet",
            "--error-exitcode=99",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite,indirect",
        ]);
        valgrind.arg(client);
        bench.run(&mut valgrind);
    }
}

/// The programs of the guide: its blocks of C that have a `main`.
fn programs_of_the_guide() -> Vec<String> {
    let guide = std::fs::read_to_string(crate_folder().join("../../docs/c.md")).unwrap();
    let blocks = guide.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("c\n"));
    blocks.filter(|block| block.contains("int main(")).map(str::to_owned).collect()
}

#[test]
fn programs_of_the_guide_echo() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    let programs = programs_of_the_guide();
    assert_eq!(programs.len(), 2, "a server and a client");
    let build = |name: &str, text: &str| {
        let source = folder.path().join(format!("{name}.c"));
        std::fs::write(&source, text).unwrap();
        bench.program(GCC, source.to_str().unwrap(), &[])
    };
    let server = build("server", &programs[0]);
    let client = build("client", &programs[1]);
    let _server = Running::start(&mut bench.command(server));
    let start = std::time::Instant::now();
    loop {
        let output = bench.command(&client).output().unwrap();
        if output.status.success() {
            assert_eq!(output.stdout, b"hello\n");
            break;
        }
        // The server prints nothing, so the client comes again until it is there.
        assert!(start.elapsed().as_secs() < 60, "{}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
