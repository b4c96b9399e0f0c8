-- Random values (clauses 2.1 and 4.3.2), and the first content of the tables (clause 4.3.3).

CREATE FUNCTION uniform(low int, high int) RETURNS int LANGUAGE sql VOLATILE
    RETURN low + floor(random() * (high - low + 1))::int;

-- NURand, clause 2.1.6
CREATE FUNCTION nurand(a int, low int, high int, c int) RETURNS int LANGUAGE sql VOLATILE
    RETURN ((uniform(0, a) | uniform(low, high)) + c) % (high - low + 1) + low;

-- The largest A below a part of the range, so that the ratio is about that of clause 2.1.6: 8191 of 100,000 items, 1023 of 3,000
-- customers, 255 of 1,000 names.
CREATE FUNCTION nurand_a(range int, part float8) RETURNS int LANGUAGE sql IMMUTABLE
    RETURN (1 << greatest(floor(log(2, greatest(range / part, 1)::numeric))::int, 0)) - 1;

-- Clause 4.3.2.3
CREATE FUNCTION last_name(number int) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    syllables CONSTANT text[] := '{BAR,OUGHT,ABLE,PRI,PRES,ESE,ANTI,CALLY,ATION,EING}';
BEGIN
    RETURN syllables[number / 100 + 1] || syllables[number / 10 % 10 + 1] || syllables[number % 10 + 1];
END $$;

-- Hexadecimal digits stand for the letters of clause 4.3.2.2.
CREATE FUNCTION letters(fewest int, most int) RETURNS text LANGUAGE sql VOLATILE
    RETURN (SELECT substr(string_agg(md5(random()::text), ''), 1, uniform(fewest, most)) FROM generate_series(0, most / 32));

CREATE FUNCTION zip() RETURNS text LANGUAGE sql VOLATILE
    RETURN lpad(uniform(0, 9999)::text, 4, '0') || '11111';

-- One of ten has ORIGINAL in it.
CREATE FUNCTION data_of_goods() RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    data text := letters(26, 50);
BEGIN
    IF uniform(1, 10) = 1 THEN
        data := overlay(data PLACING 'ORIGINAL' FROM uniform(1, length(data) - 7));
    END IF;
    RETURN data;
END $$;

CREATE FUNCTION load(warehouses int, items int, customers int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    names CONSTANT int := least(greatest(customers / 3, 1), 1000);
    -- 70 % of the orders are delivered, as 2,100 of 3,000 are.
    delivered CONSTANT int := customers * 7 / 10;
    name_a CONSTANT int := nurand_a(names, 3.9);
BEGIN
    PERFORM setseed(0.5);
    -- The C of names differs from the load's by 66 (clause 2.1.6.1).
    INSERT INTO scale VALUES (
        warehouses, items, customers, names,
        nurand_a(items, 12.2), nurand_a(customers, 2.9), name_a, 5987, 259, 223);

    INSERT INTO item
    SELECT i, uniform(1, 10000), letters(14, 24), uniform(100, 10000) / 100.0, data_of_goods()
    FROM generate_series(1, items) i;

    INSERT INTO warehouse
    SELECT w, letters(6, 10), letters(10, 20), letters(10, 20), letters(10, 20), letters(2, 2), zip(), uniform(0, 2000) / 10000.0, 300000
    FROM generate_series(1, warehouses) w;

    INSERT INTO stock
    SELECT i, w, uniform(10, 100),
        letters(24, 24), letters(24, 24), letters(24, 24), letters(24, 24), letters(24, 24),
        letters(24, 24), letters(24, 24), letters(24, 24), letters(24, 24), letters(24, 24),
        0, 0, 0, data_of_goods()
    FROM generate_series(1, warehouses) w, generate_series(1, items) i;

    INSERT INTO district
    SELECT d, w, letters(6, 10), letters(10, 20), letters(10, 20), letters(10, 20), letters(2, 2), zip(), uniform(0, 2000) / 10000.0,
        30000, customers + 1
    FROM generate_series(1, warehouses) w, generate_series(1, 10) d;

    INSERT INTO customer
    SELECT c, d, w, letters(8, 16), 'OE', last_name(CASE WHEN c <= names THEN c - 1 ELSE nurand(name_a, 0, names - 1, 157) END),
        letters(10, 20), letters(10, 20), letters(10, 20), letters(2, 2), zip(), lpad(uniform(0, 999999999)::text, 16, '0'),
        now(), CASE WHEN uniform(1, 10) = 1 THEN 'BC' ELSE 'GC' END, 50000, uniform(0, 5000) / 10000.0, -10, 10, 1, 0, letters(300, 500)
    FROM generate_series(1, warehouses) w, generate_series(1, 10) d, generate_series(1, customers) c;

    INSERT INTO history
    SELECT c_id, c_d_id, c_w_id, c_d_id, c_w_id, now(), 10, letters(12, 24) FROM customer;

    -- Each customer has one order, in a random sequence.
    INSERT INTO orders
    SELECT o, d, w, c, now(), CASE WHEN o <= delivered THEN uniform(1, 10) END, uniform(5, 15), 1
    FROM (
        SELECT w, d, c, row_number() OVER (PARTITION BY w, d ORDER BY random()) AS o
        FROM generate_series(1, warehouses) w, generate_series(1, 10) d, generate_series(1, customers) c
    ) AS each;

    INSERT INTO order_line
    SELECT o_id, o_d_id, o_w_id, number, uniform(1, items), o_w_id, CASE WHEN o_id <= delivered THEN o_entry_d END, 5,
        CASE WHEN o_id <= delivered THEN 0 ELSE uniform(1, 999999) / 100.0 END, letters(24, 24)
    FROM orders, generate_series(1, o_ol_cnt) number;

    INSERT INTO new_order
    SELECT o_id, o_d_id, o_w_id FROM orders WHERE o_id > delivered;
END $$;
