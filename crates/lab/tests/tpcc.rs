//! The TPC-C-like load of the storage appliance, on a PostgreSQL of this machine.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_lab::LabError;
use partywall_lab::nas::{NasUnit, TpccDatabase, TpccOptions, TpccScale};

/// A statement that breaks a condition, by the clause of the condition.
const BREAKS: [(&str, &str); 4] = [
    ("3.3.2.1", "UPDATE warehouse SET w_ytd = w_ytd + 1 WHERE w_id = 2"),
    ("3.3.2.2", "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = 2 AND d_id = 7"),
    // The last order and the one two before it are new, whatever was delivered, and the one between is not.
    (
        "3.3.2.3",
        "DELETE FROM new_order USING district WHERE (no_w_id, no_d_id) = (2, 7) AND (d_w_id, d_id) = (2, 7) AND no_o_id = d_next_o_id - 2; INSERT INTO new_order SELECT d_next_o_id - n, 7, 2 FROM district, unnest(ARRAY[1, 3]) n WHERE (d_w_id, d_id) = (2, 7) ON CONFLICT DO NOTHING",
    ),
    ("3.3.2.4", "DELETE FROM order_line WHERE (ol_w_id, ol_d_id, ol_o_id, ol_number) = (2, 7, 3, 1)"),
];

#[test]
fn tpcc_keeps_its_conditions_and_reports_each_broken_one() {
    let scale = TpccScale { warehouses: 2, items: 200, customers: 60 };
    let database = match TpccDatabase::create(scale) {
        Ok(database) => database,
        Err(e @ LabError::Tool { .. }) if e.to_string().contains("is missing") => {
            println!("skipped: {e} (scripts/setup.sh programs brings it)");
            return;
        }
        Err(e) => panic!("{e}"),
    };
    let options = TpccOptions { scale, terminals: 4, seconds: 2 };
    let figures = database.run(options).unwrap();
    let orders = figures.iter().find(|figure| figure.unit == NasUnit::PerMinute).unwrap();
    assert!(orders.value > 0.0, "{figures:?}");

    let number = |sql: &str| -> i64 { database.query(sql).unwrap().trim().parse().unwrap() };
    // About one of a hundred orders is to be rolled back (the random numbers are the same in each run).
    let rolled_back = "BEGIN; DO $$ BEGIN PERFORM setseed(0.5); END $$; SELECT count(*) FILTER (WHERE NOT done) FROM (SELECT (new_order(1 + g % 2)).done FROM generate_series(1, 500) g) AS orders; ROLLBACK";
    assert!((1..20).contains(&number(rolled_back)), "{}", number(rolled_back));
    // Customers are drawn by name as well: the one in the middle of those that have it.
    let by_name = "SELECT count(DISTINCT draw_customer(1, 1, s)) > 20 FROM scale s, generate_series(1, 500)";
    assert_eq!(database.query(by_name).unwrap().trim(), "t");
    assert_eq!(
        database.query("SELECT last_name(0) || last_name(371) || last_name(999)").unwrap().trim(),
        "BARBARBARPRICALLYOUGHTEINGEINGEING"
    );
    assert_eq!(number("SELECT count(*) FROM inconsistency"), 0);

    for (clause, sql) in BREAKS {
        let rows = database
            .query(&format!("BEGIN; {sql}; SELECT clause, warehouse, district FROM inconsistency; ROLLBACK"))
            .unwrap();
        let district = if clause == "3.3.2.1" { "" } else { "7" };
        assert_eq!(rows.trim(), format!("{clause}|2|{district}"));
    }
    database.query(BREAKS[0].1).unwrap();
    let e = database.run(TpccOptions { seconds: 1, ..options }).unwrap_err();
    assert!(matches!(e, LabError::Inconsistent { .. }) && e.to_string().contains("3.3.2.1, warehouse 2"), "{e}");
}
