-- Each warehouse and district for which a consistency condition of clause 3.3.2 does not hold.
CREATE VIEW inconsistency AS
-- 1: W_YTD is the sum of D_YTD.
SELECT '3.3.2.1' AS clause, w_id AS warehouse, NULL::int AS district
FROM warehouse LEFT JOIN (SELECT d_w_id, sum(d_ytd) AS ytd FROM district GROUP BY d_w_id) AS d ON d_w_id = w_id
WHERE w_ytd IS DISTINCT FROM ytd
UNION ALL
-- 2: D_NEXT_O_ID - 1 is the last order, and the last new order where there is one.
SELECT '3.3.2.2', d_w_id, d_id
FROM district
LEFT JOIN (SELECT o_w_id, o_d_id, max(o_id) AS last FROM orders GROUP BY o_w_id, o_d_id) AS o ON o_w_id = d_w_id AND o_d_id = d_id
LEFT JOIN (SELECT no_w_id, no_d_id, max(no_o_id) AS last FROM new_order GROUP BY no_w_id, no_d_id) AS n ON no_w_id = d_w_id AND no_d_id = d_id
WHERE d_next_o_id - 1 IS DISTINCT FROM o.last OR d_next_o_id - 1 <> n.last
UNION ALL
-- 3: New orders have numbers without gaps.
SELECT '3.3.2.3', no_w_id, no_d_id
FROM new_order GROUP BY no_w_id, no_d_id HAVING max(no_o_id) - min(no_o_id) + 1 <> count(*)
UNION ALL
-- 4: Orders count their lines.
SELECT '3.3.2.4', coalesce(o_w_id, ol_w_id), coalesce(o_d_id, ol_d_id)
FROM (SELECT o_w_id, o_d_id, sum(o_ol_cnt) AS counted FROM orders GROUP BY o_w_id, o_d_id) AS o
FULL JOIN (SELECT ol_w_id, ol_d_id, count(*) AS lines FROM order_line GROUP BY ol_w_id, ol_d_id) AS l
    ON ol_w_id = o_w_id AND ol_d_id = o_d_id
WHERE counted IS DISTINCT FROM lines;
