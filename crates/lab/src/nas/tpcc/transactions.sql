-- The five transactions (clauses 2.4 to 2.8). Each function draws its own input for a home warehouse.

CREATE TYPE request AS (item int, supply int, quantity int);

-- Another warehouse than this one, of which there are several.
CREATE FUNCTION other_warehouse(home int, warehouses int) RETURNS int LANGUAGE sql VOLATILE
    RETURN (home + uniform(0, warehouses - 2)) % warehouses + 1;

-- 60 % by last name: the one in the middle by first name (clauses 2.5.2.2 and 2.6.2.2, case 2).
CREATE FUNCTION draw_customer(warehouse int, district int, s scale) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    name text;
    ids int[];
BEGIN
    IF uniform(1, 100) > 60 THEN
        RETURN nurand(s.customer_a, 1, s.customers, s.customer_c);
    END IF;
    name := last_name(nurand(s.name_a, 0, s.names - 1, s.name_c));
    ids := ARRAY(SELECT c_id FROM customer WHERE c_w_id = warehouse AND c_d_id = district AND c_last = name ORDER BY c_first);
    RETURN ids[(cardinality(ids) + 1) / 2];
END $$;

-- Clause 2.4. `done` is false where its caller is to roll it back: one in a hundred asks for an item that does not exist
-- (clause 2.4.1.4).
CREATE FUNCTION new_order(home int, OUT done boolean, OUT total numeric, OUT brands text) LANGUAGE plpgsql AS $$
DECLARE
    s scale;
    of_district CONSTANT int := uniform(1, 10);
    lines CONSTANT int := uniform(5, 15);
    rolls_back CONSTANT boolean := uniform(1, 100) = 1;
    customer_id int;
    requests request[];
    each request;
    tax numeric;
    more_tax numeric;
    discount numeric;
    order_id int;
    number int := 0;
    price numeric;
    amount numeric;
    about_item text;
    about_stock text;
    info text;
BEGIN
    SELECT * INTO STRICT s FROM scale;
    customer_id := nurand(s.customer_a, 1, s.customers, s.customer_c);
    -- In one sequence of rows, so that two orders do not wait for each other; what does not exist is last.
    requests := ARRAY(
        SELECT ROW (item, supply, quantity)::request
        FROM (
            SELECT
                CASE WHEN rolls_back AND n = lines THEN s.items + 1 ELSE nurand(s.item_a, 1, s.items, s.item_c) END AS item,
                CASE WHEN s.warehouses > 1 AND uniform(1, 100) = 1 THEN other_warehouse(home, s.warehouses) ELSE home END AS supply,
                uniform(1, 10) AS quantity
            FROM generate_series(1, lines) n
        ) AS drawn
        ORDER BY item > s.items, supply, item);

    SELECT w_tax INTO STRICT tax FROM warehouse WHERE w_id = home;
    UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = home AND d_id = of_district
        RETURNING d_next_o_id - 1, d_tax INTO STRICT order_id, more_tax;
    SELECT c_discount INTO STRICT discount FROM customer WHERE c_w_id = home AND c_d_id = of_district AND c_id = customer_id;
    INSERT INTO orders VALUES (
        order_id, of_district, home, customer_id, now(), NULL, lines,
        (NOT EXISTS (SELECT FROM unnest(requests) WHERE supply <> home))::int);
    INSERT INTO new_order VALUES (order_id, of_district, home);

    total := 0;
    brands := '';
    FOREACH each IN ARRAY requests LOOP
        SELECT i_price, i_data INTO price, about_item FROM item WHERE i_id = each.item;
        IF NOT FOUND THEN
            done := false;
            RETURN;
        END IF;
        UPDATE stock SET
            s_quantity = s_quantity - each.quantity + CASE WHEN s_quantity >= each.quantity + 10 THEN 0 ELSE 91 END,
            s_ytd = s_ytd + each.quantity,
            s_order_cnt = s_order_cnt + 1,
            s_remote_cnt = s_remote_cnt + (each.supply <> home)::int
        WHERE s_w_id = each.supply AND s_i_id = each.item
        RETURNING s_data, CASE of_district
            WHEN 1 THEN s_dist_01 WHEN 2 THEN s_dist_02 WHEN 3 THEN s_dist_03 WHEN 4 THEN s_dist_04 WHEN 5 THEN s_dist_05
            WHEN 6 THEN s_dist_06 WHEN 7 THEN s_dist_07 WHEN 8 THEN s_dist_08 WHEN 9 THEN s_dist_09 ELSE s_dist_10 END
        INTO STRICT about_stock, info;
        number := number + 1;
        amount := each.quantity * price;
        INSERT INTO order_line VALUES (
            order_id, of_district, home, number, each.item, each.supply, NULL, each.quantity, amount, info);
        total := total + amount;
        brands := brands || CASE WHEN about_item ~ 'ORIGINAL' AND about_stock ~ 'ORIGINAL' THEN 'B' ELSE 'G' END;
    END LOOP;
    total := total * (1 - discount) * (1 + tax + more_tax);
    done := true;
END $$;

-- Clause 2.5
CREATE FUNCTION payment(home int) RETURNS numeric LANGUAGE plpgsql AS $$
DECLARE
    s scale;
    of_district CONSTANT int := uniform(1, 10);
    amount CONSTANT numeric(6, 2) := uniform(100, 500000) / 100.0;
    of_warehouse int := home;
    customer_district int := of_district;
    customer_id int;
    names text;
    name text;
    balance numeric;
BEGIN
    SELECT * INTO STRICT s FROM scale;
    -- 15 % pay for a customer of another warehouse (clause 2.5.1.2).
    IF s.warehouses > 1 AND uniform(1, 100) > 85 THEN
        of_warehouse := other_warehouse(home, s.warehouses);
        customer_district := uniform(1, 10);
    END IF;
    UPDATE warehouse SET w_ytd = w_ytd + amount WHERE w_id = home RETURNING w_name INTO STRICT names;
    UPDATE district SET d_ytd = d_ytd + amount WHERE d_w_id = home AND d_id = of_district RETURNING d_name INTO STRICT name;
    customer_id := draw_customer(of_warehouse, customer_district, s);
    UPDATE customer SET
        c_balance = c_balance - amount,
        c_ytd_payment = c_ytd_payment + amount,
        c_payment_cnt = c_payment_cnt + 1,
        c_data = CASE c_credit
            WHEN 'BC' THEN left(format('%s %s %s %s %s %s|%s', c_id, c_d_id, c_w_id, of_district, home, amount, c_data), 500)
            ELSE c_data END
    WHERE c_w_id = of_warehouse AND c_d_id = customer_district AND c_id = customer_id
    RETURNING c_balance INTO STRICT balance;
    INSERT INTO history VALUES (
        customer_id, customer_district, of_warehouse, of_district, home, now(), amount, names || '    ' || name);
    RETURN balance;
END $$;

-- Clause 2.6
CREATE FUNCTION order_status(home int, OUT balance numeric, OUT order_id int, OUT lines int) LANGUAGE plpgsql AS $$
DECLARE
    s scale;
    of_district CONSTANT int := uniform(1, 10);
    customer_id int;
    each record;
BEGIN
    SELECT * INTO STRICT s FROM scale;
    customer_id := draw_customer(home, of_district, s);
    SELECT c_balance INTO STRICT balance FROM customer WHERE c_w_id = home AND c_d_id = of_district AND c_id = customer_id;
    SELECT o_id INTO STRICT order_id FROM orders
        WHERE o_w_id = home AND o_d_id = of_district AND o_c_id = customer_id ORDER BY o_id DESC LIMIT 1;
    lines := 0;
    FOR each IN
        SELECT ol_i_id, ol_supply_w_id, ol_quantity, ol_amount, ol_delivery_d FROM order_line
        WHERE ol_w_id = home AND ol_d_id = of_district AND ol_o_id = order_id
    LOOP
        lines := lines + 1;
    END LOOP;
END $$;

-- Clause 2.7, at once and for all districts in one transaction (clause 2.7.2 lets it be queued). Returns how many it delivered.
CREATE FUNCTION delivery(home int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    carrier CONSTANT int := uniform(1, 10);
    order_id int;
    customer_id int;
    amount numeric;
    delivered int := 0;
BEGIN
    FOR of_district IN 1..10 LOOP
        SELECT no_o_id INTO order_id FROM new_order
            WHERE no_w_id = home AND no_d_id = of_district ORDER BY no_o_id LIMIT 1 FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM new_order WHERE no_w_id = home AND no_d_id = of_district AND no_o_id = order_id;
        UPDATE orders SET o_carrier_id = carrier WHERE o_w_id = home AND o_d_id = of_district AND o_id = order_id
            RETURNING o_c_id INTO STRICT customer_id;
        UPDATE order_line SET ol_delivery_d = now() WHERE ol_w_id = home AND ol_d_id = of_district AND ol_o_id = order_id;
        SELECT sum(ol_amount) INTO STRICT amount FROM order_line
            WHERE ol_w_id = home AND ol_d_id = of_district AND ol_o_id = order_id;
        UPDATE customer SET c_balance = c_balance + amount, c_delivery_cnt = c_delivery_cnt + 1
            WHERE c_w_id = home AND c_d_id = of_district AND c_id = customer_id;
        delivered := delivered + 1;
    END LOOP;
    RETURN delivered;
END $$;

-- Clause 2.8, with the district of a terminal
CREATE FUNCTION stock_level(home int, of_district int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    threshold CONSTANT int := uniform(10, 20);
    next int;
BEGIN
    SELECT d_next_o_id INTO STRICT next FROM district WHERE d_w_id = home AND d_id = of_district;
    RETURN (
        SELECT count(DISTINCT s_i_id) FROM order_line JOIN stock ON s_w_id = home AND s_i_id = ol_i_id
        WHERE ol_w_id = home AND ol_d_id = of_district AND ol_o_id >= next - 20 AND ol_o_id < next AND s_quantity < threshold);
END $$;
